"""Diagnoses made by hand, for the views that show them: of one run, and of each scene."""
