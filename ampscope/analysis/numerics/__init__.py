"""Formats, rounding and curves: numbers without a run."""
