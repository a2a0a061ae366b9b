"""State that is poisoned, kept beside the weights: by modules, and by optimizers."""
