"""What happens in an optimizer step, as plain data, and the protocol of whoever is told of it."""
