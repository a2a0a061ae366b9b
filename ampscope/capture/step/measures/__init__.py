"""What is measured of gradients, weights and buffers around an optimizer step."""
