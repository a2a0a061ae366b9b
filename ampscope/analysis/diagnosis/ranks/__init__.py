"""Several ranks together: whose failure it was, and which replicas have parted."""
