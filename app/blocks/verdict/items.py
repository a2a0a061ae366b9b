"""Incidents and findings as things to choose from: a short name for the address, a line for people."""

from __future__ import annotations

import streamlit as st
from state.address import told

from ampscope.analysis.causes.catalogue import cause_in_words
from ampscope.analysis.results import Diagnosis, Finding, Incident
from ampscope.analysis.words.wording import steps_in_words
from ampscope.report.html.markup import as_html
from ampscope.report.html.report_page import most_urgent_first
from ampscope.report.safe_text import short
from ampscope.trace.vocabulary import Severity

Item = Incident | Finding

INCIDENT_PAGE = "app_pages/incident.py"
SEVERITY_WORDS = {Severity.ERROR: "problem", Severity.WARNING: "warning", Severity.INFO: "harmless"}
_ICONS = {
    Severity.ERROR: ":material/error:",
    Severity.WARNING: ":material/warning:",
    Severity.INFO: ":material/info:",
}
#: Rows of the list on the overview; the incident page has all of them.
_LISTED = 20


def items(diagnosis: Diagnosis) -> dict[str, Item]:
    """Everything noticed, by a short name; what to read first comes first, harmless things last."""
    named: dict[str, Item] = {}
    for item in most_urgent_first(diagnosis):
        named[_name(item, named)] = item
    return named


def item_line(item: Item) -> str:
    """One line: when, what, how bad."""
    return f"{_capital(steps_in_words(item))}: {cause_in_words(item.cause)} ({SEVERITY_WORDS[item.severity]})"


def item_link(name: str, item: Item, label: str) -> None:
    """A link, in our own words, to the incident page that shows ``item``."""
    query = {"run": told("run") or "", "incident": name}
    st.page_link(INCIDENT_PAGE, label=label, icon=_ICONS[item.severity], query_params=query)


def item_list(named: dict[str, Item]) -> None:
    """All that was noticed: each a link, with where it happened beneath."""
    for name, item in list(named.items())[:_LISTED]:
        with st.container(gap=None):
            item_link(name, item, item_line(item))
            if where := _where(item):
                st.html(f'<div class="amp-place amp-under">{as_html(where)}</div>')
    if len(named) > _LISTED:
        st.caption(f"{len(named) - _LISTED:,} more are on the Incident page.")


def _name(item: Item, taken: dict[str, Item]) -> str:
    name = f"{item.step}-{item.cause.value}"
    return name if name not in taken else f"{name}-{len(taken)}"


def _where(item: Item) -> str:
    module = short(item.module, 60) if isinstance(item, Incident) else ""
    line = f"{short(item.source.file, 60)}:{item.source.line}" if item.source else ""
    return ", ".join(part for part in (module, line) if part)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
