"""The state that a replay begins from, and that it leaves as it is."""
