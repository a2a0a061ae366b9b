"""Sends a running training's figures and alerts to others; the training never waits for them."""
