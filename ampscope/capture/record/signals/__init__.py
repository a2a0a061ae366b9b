"""What a run tells to others while it trains: figures for trackers, and alerts; the training never waits for them."""
