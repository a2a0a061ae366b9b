"""The failed op as a script of its own, to be taken away for a bug report."""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.results import Diagnosis, Incident
from ampscope.analysis.words import op_in_words
from blocks.basics.text import paragraph
from blocks.basics.watch_line import watch_line
from data.downloads import repro_script
from data.run_snapshot import RunSnapshot

_ICON = ":material/download:"


def repro_download(run: RunSnapshot, incident: Incident, diagnosis: Diagnosis) -> None:
    """The script and its operands to download; where none were kept, why, and how to keep them."""
    script = repro_script(run, incident)
    if isinstance(script, str):
        paragraph(f"There is no script that shows this op failing on its own: {script}.")
        watch_line(diagnosis, "save_tensors=True")
        return
    paragraph(f"A script that makes this one call of {op_in_words(incident.op)} again, as it ran and in a wider dtype.")
    with st.container(horizontal=True):
        st.download_button("repro.py", script.text, "repro.py", "text/x-python", icon=_ICON, on_click="ignore")
        if script.data is not None:
            name = "repro.safetensors"
            st.download_button(f"{name}, to lie beside it", script.data, name, icon=_ICON, on_click="ignore")
