"""Measures a tensor's values: in a light pass for real steps, in a full one for replays."""
