"""Cures: what a replay has proved, as something that can be done to the live training."""
