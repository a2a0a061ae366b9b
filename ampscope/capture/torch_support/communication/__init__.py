"""What is known of the other ranks without asking them: shards, collectives; and how ranks that heal decide alike."""
