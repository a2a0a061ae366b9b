"""The style sheet of the app: the report's, and what fits Streamlit's own elements to it."""

from __future__ import annotations

import streamlit as st

from ampscope.report.html.sheet import SHEET

_STREAMLIT = """
.stMainBlockContainer { padding: 2.6rem 2.2rem 3rem; }
.stMainBlockContainer h1 { font-size: 2rem; padding-bottom: 0.2rem; }
.stMainBlockContainer h3 { font-size: 1.3rem; }
/* What is drawn anew every few seconds must not fade each time; a copy button must be seen to be found. */
[data-stale="true"] { opacity: 1 !important; }
[data-testid="stCode"] > div:has([data-testid="stElementToolbarButton"]) { opacity: 1; visibility: visible; }
[data-testid="stPageLink-NavLink"] * { white-space: normal; overflow: visible; text-overflow: clip; }
"""


def style() -> None:
    """Put the style sheet into the page."""
    st.html(f"<style>{SHEET}{_STREAMLIT}</style>")
