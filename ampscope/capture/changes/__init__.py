"""A replay may change something: the failure that it asks about, the change, and other forms of a call."""
