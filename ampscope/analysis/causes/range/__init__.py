"""Causes by the range of a dtype: what is past its ends, and what is on its way there."""
