"""Trainings that call their model through torch.func, never call backward, or keep and move weights by themselves."""
