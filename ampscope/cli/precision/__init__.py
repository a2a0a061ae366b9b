"""The verbs that say what precision a run needs: its loss scale, its ranges, the formats its modules could run in."""
