"""Two runs, or two steps, against each other: what was changed, where the numbers part, and what else differs."""
