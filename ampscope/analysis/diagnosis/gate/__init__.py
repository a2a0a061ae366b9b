"""Whether a run keeps the limits that a continuous integration sets it."""
