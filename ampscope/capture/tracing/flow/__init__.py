"""Keeps what the ops of one step gave, and which of it other ops read."""
