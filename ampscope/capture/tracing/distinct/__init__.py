"""How many different values casts to half precision leave of those that number something."""
