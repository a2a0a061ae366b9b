"""Incidents and findings as links, a line each."""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.causes.catalogue import what_in_words
from ampscope.analysis.results import Incident
from ampscope.analysis.words import when_in_words
from ampscope.report.html.markup import as_html
from ampscope.report.safe_text import short
from ampscope.trace.vocabulary import Severity
from blocks.basics.page_links import rank_of, to_incident
from data.named_items import Item

_SEVERITIES = {Severity.ERROR: "problem", Severity.WARNING: "warning", Severity.INFO: "harmless"}
_ICONS = {
    Severity.ERROR: ":material/error:",
    Severity.WARNING: ":material/warning:",
    Severity.INFO: ":material/info:",
}
#: Rows of the list; the incident page has all of them.
_LISTED = 20


def item_list(items: dict[str, Item]) -> None:
    """All that was noticed: each a link, with where it happened beneath."""
    for name, item in list(items.items())[:_LISTED]:
        with st.container(gap=None):
            item_link(name, item, item_line(item))
            if where := _where(item):
                st.html(f'<div class="amp-place amp-under">{as_html(where)}</div>')
    if len(items) > _LISTED:
        st.caption(f"{len(items) - _LISTED:,} more are on the Incident page.")


def item_link(name: str, item: Item, label: str) -> None:
    """A link, in our own words, to the incident page that shows ``item``."""
    to_incident(name, label, icon=_ICONS[item.severity], rank=rank_of(item))


def item_line(item: Item) -> str:
    """One line: when, what, how bad."""
    steps = when_in_words(item)
    return f"{steps[:1].upper()}{steps[1:]}: {what_in_words(item)} ({_SEVERITIES[item.severity]})"


def _where(item: Item) -> str:
    module = short(item.module, 60) if isinstance(item, Incident) else ""
    line = f"{short(item.source.file, 60)}:{item.source.line}" if item.source else ""
    return ", ".join(part for part in (module, line) if part)
