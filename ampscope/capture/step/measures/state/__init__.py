"""Whether what outlives a step is finite: weights, buffers, optimizer state, and tensors that a loop carries along."""
