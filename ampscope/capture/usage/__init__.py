"""Mistakes in the use of the scaler and of autocast, from the order of events and from values."""
