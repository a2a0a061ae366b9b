"""A failed op as a script of its own."""
