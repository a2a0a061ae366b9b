"""WING B: pure functions from a run to typed results."""
