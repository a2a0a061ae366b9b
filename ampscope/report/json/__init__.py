"""Results as JSON, and the JSON Schema of each."""
