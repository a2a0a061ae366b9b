"""Looks at steps that went well, by running them again: what was lost in them, or hidden."""
