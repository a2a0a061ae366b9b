"""The search for what would have cured a step, or an optimizer's step, that went wrong."""
