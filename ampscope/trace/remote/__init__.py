"""Runs in object stores: where one lies, and how its files are listed and read there, whatever fsspec opens."""
