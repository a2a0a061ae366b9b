"""A run, its ranks, a step or a list of runs at a glance."""
