"""Sending a run to an object store while it is written: off the training thread, through every fault of the network."""
