"""GROUND: what the record of a run is, how it is written and read. Knows no torch."""
