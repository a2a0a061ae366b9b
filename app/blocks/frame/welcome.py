"""Shows how to make a run, as long as there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import streamlit as st

from blocks.basics.text import alarm, heading, paragraph
from data.run_folders import ASK_AGAIN_S, RunFolder

_LINE = """\
import ampscope

ampscope.watch(model, scaler)  # once, before the training loop
"""


def unreachable(folders: Mapping[RunFolder, str]) -> None:
    """Say in which folders no run could be looked for, and why."""
    for folder, why in folders.items():
        again = f"The app asks again every {ASK_AGAIN_S} seconds."
        alarm(f"Runs in {folder.path} cannot be listed", f"{why}\n{again}")


def samples_only(folders: Sequence[RunFolder]) -> None:
    """Say, above a sample, that there is no run of the reader's own yet, and which line makes one."""
    own = ", ".join(str(folder.path) for folder in folders if not folder.is_sample)
    if not own:
        paragraph("What follows is a sample.")
        return
    paragraph(f"A sample: there is no run of yours in {own} yet. One line, before the training loop, makes one:")
    st.code("ampscope.watch(model, scaler)", language="python")


def welcome(folders: Sequence[RunFolder]) -> None:
    """Say that there is no run, where runs were looked for, and which line makes one."""
    st.title("No run yet", anchor=False)
    paragraph("Add one line to your training script and start it; this page finds the run.")
    st.code(_LINE, language="python")
    heading("Where runs were looked for")
    for folder in folders:
        if not folder.is_sample:
            st.code(str(folder.path), language=None, wrap_lines=True)
    paragraph("Look somewhere else with:")
    st.code("ampscope view FOLDER", language="bash")
    st.button("Look again")
