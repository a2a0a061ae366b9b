"""Spikes without a NaN: what was far out of its band, where it rose, and whether the training got over it."""
