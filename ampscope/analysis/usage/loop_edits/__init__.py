"""Usage mistakes mended in the user's own loop: lines inserted, moved or dedented in the file that they stand in."""
