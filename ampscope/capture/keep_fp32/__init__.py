"""Float32 inside an autocast region, for one forward or for modules by name."""
