"""Gives the keyboard back to the page once something was chosen in a select box."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

_RELEASE = st.components.v2.component(
    "ampscope.keyboard_release",
    html="<span></span>",
    js=Path(__file__).with_name("keyboard_release.js").read_text("utf-8"),
)


def release_keyboard() -> None:
    """Have the keys that the page's buttons name work right after a choice."""
    _RELEASE(key="keyboard", height=0)
