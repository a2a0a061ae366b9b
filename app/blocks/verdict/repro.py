"""The failed op as a script of its own, to be taken away for a bug report."""

from __future__ import annotations

import streamlit as st
from data.loader import Loaded
from data.takeaways import script

from ampscope.analysis.results import Incident
from ampscope.analysis.words.wording import op_in_words
from blocks.basics.notes import paragraph

_RECORD = "ampscope.watch(model, scaler, save_tensors=True)"
_ICON = ":material/download:"


def repro(loaded: Loaded, incident: Incident) -> None:
    """The script and its operands to download; where none were kept, why, and how to keep them."""
    made = script(loaded, incident)
    if isinstance(made, str):
        paragraph(f"There is no script that shows this op failing on its own: {made}.")
        st.code(_RECORD, language="python")
        return
    paragraph(f"A script that makes this one call of {op_in_words(incident.op)} again, as it ran and in a wider dtype.")
    with st.container(horizontal=True):
        st.download_button("repro.py", made.text, "repro.py", "text/x-python", icon=_ICON, on_click="ignore")
        if made.data is not None:
            name = "repro.safetensors"
            st.download_button(f"{name}, to lie beside it", made.data, name, icon=_ICON, on_click="ignore")
