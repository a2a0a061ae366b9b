"""What precision each op ran in, and why."""
