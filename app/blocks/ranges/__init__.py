"""Draws the parts of the Ranges page: the heat map of all modules, and one place close up."""
