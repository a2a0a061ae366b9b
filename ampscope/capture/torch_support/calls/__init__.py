"""What a call of a torch function does, told by its name and arguments."""
