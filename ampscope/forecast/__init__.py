"""When a magnitude that grows, or falls, will leave the range of its dtype; pure, for capture and analysis alike."""
