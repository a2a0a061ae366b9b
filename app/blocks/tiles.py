"""Facts side by side: a value in bold, what it is beneath."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st
from markup import as_html


def tiles(facts: Sequence[tuple[str, str]]) -> None:
    """A row of ``(what, value)``; it wraps where the window is narrow."""
    drawn = "".join(_tile(what, value) for what, value in facts)
    st.html(f'<div class="amp-tiles">{drawn}</div>')


def _tile(what: str, value: str) -> str:
    return f'<div class="amp-tile"><b>{as_html(value)}</b><span>{as_html(what)}</span></div>'
