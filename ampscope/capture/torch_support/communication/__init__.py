"""Reads what is known of other ranks without asking them, and lets ranks that heal decide alike."""
