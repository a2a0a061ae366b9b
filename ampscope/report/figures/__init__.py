"""Figures before they are drawn: what is in them, on which axes, in which order and colours, and what they say.

A painter, one for HTML and one for the app's page, decides nothing but how its medium draws a line or a box.
"""
