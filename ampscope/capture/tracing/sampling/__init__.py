"""Samples healthy steps: every statistic of some tensors, and how near each comes to the limits of its dtype."""
