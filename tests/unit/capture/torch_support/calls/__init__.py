"""Tests of what surrounds a call."""
