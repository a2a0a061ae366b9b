"""Tests of the step tape."""
