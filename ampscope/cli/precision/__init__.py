"""The verbs that say what precision a run needs: its loss scale, and the formats its modules could compute in."""
