"""The cures for a failure: those that replays have tried, and those that are advised."""
