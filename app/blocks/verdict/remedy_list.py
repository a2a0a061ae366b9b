"""Shows the remedies: each with its mark and its code, ready to copy."""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.results import Finding, Incident, Remedy
from ampscope.report.html.markup import as_html, as_source
from ampscope.report.html.parts.card import remedy_mark

#: Pixels: a line of code, and what is around it.
_LINE, _AROUND = 22.4, 32


def remedy_list(item: Incident | Finding) -> None:
    """The remedies in the order of the diagnosis, which puts the best first."""
    for remedy in item.remedies:
        with st.container(gap=None):
            st.html(f"<div>{as_html(remedy.text, 1000)} {remedy_mark(item, remedy)}</div>")
            remedy_code(remedy)


def code_height(remedy: Remedy) -> int:
    """The least height of `remedy_code`, in pixels."""
    lines = (remedy.diff or remedy.code).rstrip().count("\n") + 1
    return round(_LINE * lines) + _AROUND if remedy.diff or remedy.code else 0


def remedy_code(remedy: Remedy) -> None:
    """Shows the code to write: the change of the user's own lines where it is known, else the general form."""
    if remedy.diff:
        st.code(as_source(remedy.diff), language="diff", wrap_lines=True)
    elif remedy.code:
        st.code(as_source(remedy.code), language="python", wrap_lines=True)
