"""State lives across steps: weights, buffers, optimizer state and the loop's own tensors, and who wrote them."""
