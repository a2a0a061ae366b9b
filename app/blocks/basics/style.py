"""The style sheet of the app: the report's, and what fits Streamlit's own elements to it."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from ampscope.report.html.sheet import SHEET

_STREAMLIT = Path(__file__).with_suffix(".css").read_text("utf-8")


def style() -> None:
    """Put the style sheet into the page."""
    st.html(f"<style>{SHEET}{_STREAMLIT}</style>")
