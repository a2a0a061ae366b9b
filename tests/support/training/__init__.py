"""Loops that the tests train, bare and watched, and what they leave behind."""
