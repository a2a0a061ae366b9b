"""Titles, paragraphs and cards of plain text."""

from __future__ import annotations

import streamlit as st

from ampscope.report.html.markup import as_code, as_html


def paragraph(text: str, limit: int = 4000) -> None:
    """A paragraph of plain text."""
    st.html(f"<p style='margin:0;overflow-wrap:anywhere'>{as_html(text, limit)}</p>")


def title(words: str) -> None:
    """The page's title."""
    st.title(words, anchor=False)


def heading(text: str) -> None:
    """A section's heading: our own words."""
    st.header(text, anchor=False)


def good(title: str, text: str) -> None:
    """Shows good news as a card."""
    st.html(f'<div class="amp-card good"><div class="amp-title">{as_html(title)}</div>{as_html(text)}</div>')


def alarm(title: str, text: str) -> None:
    """An error that people can act on."""
    st.html(
        f'<div class="amp-card error"><div class="amp-title">{as_html(title)}</div>'
        f'<div class="amp-code">{as_code(text)}</div></div>'
    )
