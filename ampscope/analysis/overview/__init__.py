"""A run, a step or a list of runs at a glance."""
