"""The ground that capture stands on: torch's private names, its modules and state, guards around our own faults."""
