"""The writing side of a trace: rows from the training thread, files that survive its death."""
