"""Healing on several ranks: what each has proved on its own part of a bad step, and what all do about it."""
