"""Draws the frame of every page: the side bar, the pulse of a running training, the welcome."""
