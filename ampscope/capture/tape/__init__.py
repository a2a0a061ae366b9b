"""The step tape: an ordered list of the calls that made a step, with references to their arguments."""
