"""Changes of other lines of a program than the one that failed: where autocast begins, where something was made."""
