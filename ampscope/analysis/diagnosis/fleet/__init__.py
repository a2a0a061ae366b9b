"""Questions over all runs of a fleet: what fails, where, on which hosts and versions, what it costs, what changed."""
