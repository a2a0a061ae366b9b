"""The GPU check itself: that it can be run without a GPU, and that each kind of claim fails where it is not true."""
