"""What is measured of a tensor's values: a light pass for real steps, a full one for replays."""
