"""Healing on several ranks."""
