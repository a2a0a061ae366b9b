"""The call that watches a loop, with the options that would have shown more of it."""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.results import Diagnosis


def watch_line(diagnosis: Diagnosis, options: str) -> None:
    """``ampscope.watch`` as the loop of this run calls it, to be pasted.

    Args:
        diagnosis: Of the run; it tells whether its loop has a scaler.
        options: What to add, e.g. ``every=1``.
    """
    watched = "model, scaler" if diagnosis.scale else "model"
    st.code(f"ampscope.watch({watched}, {options})", language="python", wrap_lines=True)
