"""What a step lost and where, and what a replay may do otherwise: changes, and other forms of a call."""
