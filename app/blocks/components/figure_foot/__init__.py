"""Shows the foot of every figure: its range of steps where it has one, and buttons to save it."""
