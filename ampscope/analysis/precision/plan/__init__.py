"""What each module would lose in a narrower format, and which modules should stay above it."""
