"""Pieces with a script of their own."""
