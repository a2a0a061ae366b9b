"""Models whose parameters, activations or gradients lie on several ranks."""
