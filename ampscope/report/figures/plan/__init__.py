"""The figures of a precision plan: what modules would lose, and the loss scales that keep gradients."""
