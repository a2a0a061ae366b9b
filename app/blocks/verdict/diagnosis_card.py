"""The card at the top: verdict, what, where, why, and what next."""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.results import Diagnosis, Finding, Incident
from ampscope.report.html.parts.card import item_html, verdict_html
from blocks.verdict.remedy_list import remedy_code


def diagnosis_card(diagnosis: Diagnosis) -> None:
    """The one thing to tell first, with the code of the best remedy to copy; a healthy run says so calmly."""
    st.html(verdict_html(diagnosis))
    remedies = diagnosis.primary.remedies if diagnosis.primary else ()
    if remedies:
        remedy_code(remedies[0])


def item_card(item: Incident | Finding) -> None:
    """One incident or finding; a harmless one says that it is."""
    st.html(item_html(item))
