"""The last step that went well before an incident, and what has moved since."""
