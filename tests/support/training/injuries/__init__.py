"""What is done to AMPscope while it watches a training."""
