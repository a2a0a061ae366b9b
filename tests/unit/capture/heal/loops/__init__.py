"""Healed loops that are not the one of the recipe."""
