"""The search that opens with Ctrl-K."""
