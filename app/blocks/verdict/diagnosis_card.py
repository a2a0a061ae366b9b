"""The card at the top: verdict, what, where, why, and what next."""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.results import Diagnosis, Finding, Incident
from ampscope.report.html.parts.card import item_html, verdict_html
from blocks.basics.room import keep_room
from blocks.verdict.remedy_list import code_height, remedy_code


def diagnosis_card(diagnosis: Diagnosis) -> None:
    """The one thing to tell first, with the code of the best remedy to copy; a healthy run says so calmly."""
    st.html(verdict_html(diagnosis))
    remedies = diagnosis.primary.remedies if diagnosis.primary else ()
    if remedies:
        with st.container(key="amp-remedy"):
            keep_room("amp-remedy", code_height(remedies[0]))
            remedy_code(remedies[0])


def item_card(item: Incident | Finding, *, ranks: str = "") -> None:
    """One incident or finding; a harmless one says that it is. ``ranks`` is HTML on the ranks it concerns."""
    st.html(item_html(item, ranks=ranks))
