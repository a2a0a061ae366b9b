"""A line that says what a link asked for and is not there."""

from __future__ import annotations

import streamlit as st

from ampscope.report.html.markup import as_html


def not_there(label: str, asked: str | None, instead: str) -> None:
    """Say that what a link asked for is not there, and what is shown instead."""
    words = f"{label}: there is no {asked} here; this is {instead}."
    st.html(f'<div class="amp-place">{as_html(words, 240)}</div>')
