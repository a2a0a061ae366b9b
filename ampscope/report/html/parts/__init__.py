"""Pieces of a page: cards, tables, tiles and source lines."""
