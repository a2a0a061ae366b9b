"""What stands below every figure: its range of steps where it has one, and saving it."""
