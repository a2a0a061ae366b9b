"""Observing the ops of one step: dtypes, dataflow, statistics, places in the user's code."""
