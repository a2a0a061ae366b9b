"""The reading side of a trace: runs found, opened and queried, also while they are being written."""
