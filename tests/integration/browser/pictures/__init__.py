"""The pictures of the app that people look at, and those that the documentation shows."""
