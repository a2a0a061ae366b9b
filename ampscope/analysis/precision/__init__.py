"""The precision that each op ran in, and why."""
