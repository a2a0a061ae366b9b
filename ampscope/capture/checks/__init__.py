"""Checks ask of steps that look good what was lost in them to half precision, spiked or stood still, and audit them."""
