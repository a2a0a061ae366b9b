"""What cures a failure: what was tried, and what is advised."""
