"""What keeps a replay apart from the training: snapshots, copies, guards of memory and of devices."""
