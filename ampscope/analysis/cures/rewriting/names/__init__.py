"""What the names of someone's program stand for where a line reads them: by its imports, assignments and arguments."""
