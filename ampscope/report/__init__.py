"""Views of the results: terminal text and JSON."""
