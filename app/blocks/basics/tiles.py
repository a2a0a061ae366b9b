"""Facts side by side: a value in bold, what it is beneath."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from ampscope.report.html.parts.card import Fact, tiles_html


def tiles(facts: Sequence[Fact]) -> None:
    """A row of facts; it wraps where the window is narrow."""
    st.html(tiles_html(facts))
