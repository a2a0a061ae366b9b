"""The user's statements are parsed, and changed at the places of their parts; nothing is run."""
