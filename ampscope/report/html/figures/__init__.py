"""Figures over steps, magnitudes and paths, with the colours they share."""
