"""Calls of a model through torch.func, and gradients that no backward has left: what the tape knows of them."""
