"""The step that the reader came for, and the scale simulator."""
