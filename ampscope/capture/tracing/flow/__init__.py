"""What the ops of one step gave, and which of it others read."""
