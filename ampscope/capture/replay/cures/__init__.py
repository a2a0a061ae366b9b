"""The search for what cures a step that went wrong: where it failed, and what is tried on it."""
