"""Two small training scripts, written as a user would write them, each watched with the one line."""
