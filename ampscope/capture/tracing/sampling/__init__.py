"""What a healthy step tells of ranges: every statistic of some of its tensors, and how near each is to its limits."""
