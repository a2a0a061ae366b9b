"""The small pieces that every page is made of."""
