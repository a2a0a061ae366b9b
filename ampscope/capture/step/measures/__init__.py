"""Measures gradients, weights and buffers around an optimizer step."""
