"""What is known of the other ranks without asking them: shards, collectives, and that none of ours ever begins."""
