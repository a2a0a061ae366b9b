"""Remedies as changes of someone's own lines: a line goes in, a changed line comes out; nothing is run."""

from ampscope.analysis.rewriting.edit import Edit, unified
from ampscope.analysis.rewriting.rewriting import rewritten

__all__ = ["Edit", "rewritten", "unified"]
