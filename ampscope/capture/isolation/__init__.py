"""A replay is kept apart from the training by snapshots, copies, and guards of memory and of devices."""
