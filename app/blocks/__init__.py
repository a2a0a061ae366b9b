"""Pieces of a page made from results: verdict, tiles, path, tables, remedies."""
