"""Plain words for what the files hold as identifiers and numbers."""
