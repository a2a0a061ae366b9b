"""Titles, paragraphs, cards and facts are drawn as plain text, and room is kept for what comes later."""

from __future__ import annotations

import re
from collections.abc import Sequence

import streamlit as st

from ampscope.analysis.results import Diagnosis
from ampscope.report.html.cards import Fact, tiles_html
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


def tiles(facts: Sequence[Fact]) -> None:
    """A row of facts; it wraps where the window is narrow."""
    st.html(tiles_html(facts))


def watch_line(diagnosis: Diagnosis, options: str) -> None:
    """``ampscope.watch`` as the loop of this run calls it, to be pasted.

    Args:
        diagnosis: Of the run; it tells whether its loop has a scaler.
        options: What to add, e.g. ``every=1``.
    """
    watched = "model, scaler" if diagnosis.scale else "model"
    st.code(f"ampscope.watch({watched}, {options})", language="python", wrap_lines=True)


def how_to_trace(diagnosis: Diagnosis) -> None:
    """Say that nothing was traced, and which line traces a step now and then."""
    paragraph("No step of this run was traced op by op. Trace one in every so many steps:")
    watch_line(diagnosis, "every=500")


def keep_room(key: str, pixels: int) -> None:
    """The element or container with ``key`` is at least so tall, from the beginning on."""
    name = re.sub(r"[^a-zA-Z0-9_-]", "-", key.strip())
    st.html(f"<style>.st-key-{name} {{ min-height: {pixels}px; }}</style>")
