"""The loss scale: its history, its health, its skips, and what might have been."""
