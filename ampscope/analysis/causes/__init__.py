"""Every cause in one place: its name, its sentence, its remedies, and the rule that recognises it."""
