"""A run's tables as frames, arrays and histories: what every other room of analysis reads."""
