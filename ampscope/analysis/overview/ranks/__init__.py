"""A run of several ranks: who is there, which of them a bad value came from, and whether replicas agree."""
