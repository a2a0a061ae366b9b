"""Writes what capture saw, as rows of the trace, files beside it and lines in the terminal."""
