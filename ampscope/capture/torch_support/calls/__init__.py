"""Tells by name and arguments how a call of a torch function acts on its tensors."""
