"""A gate's outcome in the forms that continuous integrations and code hosts read."""
