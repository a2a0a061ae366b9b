"""The audit of a step: which layers lose most by the dtype that they compute in, and what that does to the loss."""
