"""Forms of calls that are well in float32, and lose themselves in the range or the precision of a half dtype."""
