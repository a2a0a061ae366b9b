"""What goes wrong without a single NaN: updates and gradients that are lost, spikes that training did not get over."""
