"""``torch.compile`` in all its orders: what is seen of a loop, and what watching changes (nothing)."""
