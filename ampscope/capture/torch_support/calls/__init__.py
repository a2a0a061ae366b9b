"""What a call is, told by its function and its arguments."""
