"""What has not happened yet, and will if it goes on: warnings before the fact."""
