"""The scaler at one step, and as it might have been set."""
