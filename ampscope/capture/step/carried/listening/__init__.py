"""Listening to a loop between two steps: the mode that sees its calls, and what is taken down of them."""
