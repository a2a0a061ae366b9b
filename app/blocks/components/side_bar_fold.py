"""Folds the side bar in a narrow window once a page was chosen in it."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

_FOLD = st.components.v2.component(
    "ampscope.side_bar_fold",
    html="<span></span>",
    js=Path(__file__).with_name("side_bar_fold.js").read_text("utf-8"),
)


def fold_side_bar() -> None:
    """Have a click on a link in the side bar fold it where it lies over the page."""
    _FOLD(key="side_bar_fold", height=0)
