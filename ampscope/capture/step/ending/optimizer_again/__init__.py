"""An optimizer that left something bad steps again, on copies: for its op, and for what would have kept it finite."""
