"""What stands around every page: the side bar, the pulse of a running training, the welcome."""
