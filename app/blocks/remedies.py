"""What to change: each remedy with its mark and its code, ready to copy."""

from __future__ import annotations

import streamlit as st
from markup import as_html, as_source

from ampscope.analysis.results import Finding, Incident, Remedy

_MARKS = {
    True: ("good", "tried on this step: cures it"),
    False: ("warning", "tried on this step: does not cure it"),
    None: ("info", "not tried on this step"),
}


def remedies(item: Incident | Finding) -> None:
    """The remedies in the order of the diagnosis, which puts the best first; only an incident's can be tried."""
    for remedy in item.remedies:
        with st.container(gap=None):
            st.html(f"<div>{as_html(remedy.text, 1000)} {_mark(remedy) if isinstance(item, Incident) else ''}</div>")
            if remedy.code:
                st.code(as_source(remedy.code), language="python", wrap_lines=True)


def _mark(remedy: Remedy) -> str:
    kind, words = _MARKS[remedy.verified]
    return f'<span class="amp-chip {kind}">{words}</span>'
