"""Notebooks: cells are run again, loops are interrupted, models are forgotten."""
