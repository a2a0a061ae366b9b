"""What there is to see before there is a run: how to make one."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st
from data.run_places import Place

from blocks.basics.notes import heading, paragraph

_LINE = """\
import ampscope

ampscope.watch(model, scaler)  # once, before the training loop
"""


def samples_only(looked: Sequence[Place]) -> None:
    """Say, above a sample, that there is no run of the reader's own yet, and which line makes one."""
    folders = ", ".join(str(place.path) for place in looked if not place.is_sample)
    with st.container(border=True):
        paragraph(f"No run of yours in {folders} yet; what follows is a sample. One line in a script makes one:")
        st.code(_LINE, language="python")


def welcome(looked: Sequence[Place]) -> None:
    """Say that there is no run, where runs were looked for, and which line makes one."""
    st.title("No run yet", anchor=False)
    paragraph("Add one line to your training script and start it; this page finds the run.")
    st.code(_LINE, language="python")
    heading("Where runs were looked for")
    for place in looked:
        if not place.is_sample:
            st.code(str(place.path), language=None, wrap_lines=True)
    paragraph("Look somewhere else with:")
    st.code("ampscope view FOLDER", language="bash")
    st.button("Look again")
