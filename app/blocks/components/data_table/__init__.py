"""The table of every page."""
