"""The failed op as a script of its own, to be taken away for a bug report."""

from __future__ import annotations

import streamlit as st
from closer import kept_call, script
from loader import Loaded

from ampscope.analysis.results import Incident
from blocks.notes import paragraph

_RECORD = "ampscope.watch(model, scaler, save_tensors=True)"
_FILE = "repro"


def repro(loaded: Loaded, incident: Incident) -> None:
    """The script and its operands to download; where none were kept, why, and how to keep them."""
    kept = kept_call(loaded, incident)
    if isinstance(kept, str):
        paragraph(f"There is no script that shows this op failing on its own: {kept}.")
        st.code(_RECORD, language="python")
        return
    made = script(loaded, kept)
    paragraph(f"A script that makes this one call again: {kept.saved.call.op}, as it ran and in a wider dtype.")
    with st.container(horizontal=True):
        st.download_button(
            "Script", made.text, f"{_FILE}.py", "text/x-python", icon=":material/download:", on_click="ignore"
        )
        if made.data is not None:
            st.download_button(
                "Its operands", made.data, f"{_FILE}.safetensors", icon=":material/download:", on_click="ignore"
            )
