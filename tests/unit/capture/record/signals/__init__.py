"""What a run tells to others while it trains."""
