"""Watching changes nothing: no bit of a training, no call that a user's mode sees."""
