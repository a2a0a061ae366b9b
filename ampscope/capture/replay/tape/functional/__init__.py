"""Calls of a model through torch.func, and gradients that no backward has left: what the tape knows of them.

Likewise what the loop does to gradients when a scaler has divided them by the loss scale.
"""
