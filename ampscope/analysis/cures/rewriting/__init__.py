"""Remedies as changes of someone's own lines: a line goes in, a changed line comes out; nothing is run."""

from ampscope.analysis.cures.rewriting.edit import Edit, unified
from ampscope.analysis.cures.rewriting.rewriting import rewritten

__all__ = ["Edit", "rewritten", "unified"]
