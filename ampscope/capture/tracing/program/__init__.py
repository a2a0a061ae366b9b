"""Tells where the program is while an op runs: in which module, torch function and line of the user's code."""
