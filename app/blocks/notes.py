"""Sentences from a result, shown as plain text."""

from __future__ import annotations

from pathlib import Path

import streamlit as st
from markup import as_code, as_html, short

from ampscope.analysis.results import SourceLine


def paragraph(text: str, limit: int = 4000) -> None:
    """A paragraph of plain text."""
    st.html(f"<p style='margin:0'>{as_html(text, limit)}</p>")


def page_head(title: str, run: str) -> None:
    """The page's title and the run it shows."""
    st.title(title, anchor=False)
    st.html(f'<div class="amp-place">Run: {as_html(run, 160)}</div>')


def heading(text: str) -> None:
    """A section's heading: our own words."""
    st.subheader(text, anchor=False)


def alarm(title: str, text: str) -> None:
    """An error that people can act on."""
    st.html(
        f'<div class="amp-card error"><div class="amp-title">{as_html(title)}</div>'
        f'<div class="amp-code">{as_code(text)}</div></div>'
    )


def place(source: SourceLine | None) -> str:
    """``train.py:42``, with the folder left out."""
    return f"{short(Path(source.file).name, 40)}:{source.line}" if source else ""


def source_html(source: SourceLine | None, *, hit: bool = False) -> str:
    """A line of the user's program with where it stands."""
    if source is None:
        return '<span class="amp-place">No line of yours is known for it.</span>'
    where = f"{short(source.file, 120)}:{source.line}"
    function = f" in {source.function}" if source.function else ""
    code = f'<div class="amp-code{" hit" if hit else ""}">{as_html(source.code.strip())}</div>' if source.code else ""
    return f'<span class="amp-place">{as_html(where + function)}</span>{code}'
