"""Tests of what a replay copies, keeps and puts back."""
