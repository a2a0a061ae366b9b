"""The verbs that take a remedy up: as a change of the user's own files."""
