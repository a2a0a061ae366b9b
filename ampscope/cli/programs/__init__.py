"""Verbs for other programs: continuous integration, and whoever reads JSON."""
