"""Mistakes in the use of autocast and the scaler, and what was checked of a loop."""
