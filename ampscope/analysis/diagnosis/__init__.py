"""The verdict on a run."""
