"""The state that a replay begins from: it works on copies, or puts it back as it was."""
