"""A traced step as a recording that can be walked op by op."""
