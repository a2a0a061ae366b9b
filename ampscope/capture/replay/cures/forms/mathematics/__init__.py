"""Forms of calls that are not defined, or infinite, for what they were given: float32 fails there, too."""
