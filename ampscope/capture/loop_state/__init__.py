"""What lives across steps - weights, buffers, optimizer state, the loop's own tensors - and who wrote it."""
