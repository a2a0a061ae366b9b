"""The card at the top: verdict, what, where, why, and what next."""

from __future__ import annotations

import streamlit as st
from markup import as_html

from ampscope.analysis.results import Diagnosis, Finding, Incident
from ampscope.analysis.wording import cause_in_words, steps_in_words
from ampscope.report import figures
from ampscope.trace.vocabulary import Severity, Verdict
from blocks.notes import source_html
from blocks.remedies import remedies


def verdict_card(diagnosis: Diagnosis) -> None:
    """The one thing to tell first; a healthy run says so calmly."""
    primary = diagnosis.primary
    if primary is None:
        _calm(diagnosis)
        return
    why = "" if primary.explanation in diagnosis.summary else primary.explanation
    facts = [("What", as_html(_what(primary))), ("Where", _where(primary)), ("Why", as_html(why, 2000))]
    _card(primary.severity, diagnosis.summary, facts)
    if primary.remedies:
        st.markdown("**Next**")
        remedies(primary)


def item_card(item: Incident | Finding) -> None:
    """One incident or finding; a harmless one says that it is."""
    calm = [("Verdict", "Harmless: nothing needs to change.")] if item.severity == Severity.INFO else []
    _card(item.severity, _what(item), [*calm, ("Where", _where(item)), ("Why", as_html(item.explanation, 2000))])


def _calm(diagnosis: Diagnosis) -> None:
    kind = "good" if diagnosis.verdict == Verdict.HEALTHY else "warning"
    harmless = figures.count(len(diagnosis.incidents), "harmless event")
    facts = [("Seen", f"{harmless}, listed below.")] if diagnosis.incidents else []
    _card(kind, diagnosis.summary, facts)


def _card(kind: str, title: str, facts: list[tuple[str, str]]) -> None:
    rows = "".join(f"<span>{name}</span><div>{body}</div>" for name, body in facts if body)
    st.html(
        f'<div class="amp-card {kind}"><div class="amp-title">{as_html(title, 300)}</div>'
        f'<div class="amp-facts">{rows}</div></div>'
    )


def _what(item: Incident | Finding) -> str:
    words = cause_in_words(item.cause)
    return f"{words[:1].upper()}{words[1:]}, {steps_in_words(item)}"


def _where(item: Incident | Finding) -> str:
    op = _op_in(item) if isinstance(item, Incident) else ""
    if not op and item.source is None:
        return "" if item.severity == Severity.INFO else "Not known."
    return f"<div>{as_html(op)}</div>{source_html(item.source, hit=True)}" if op else source_html(item.source, hit=True)


def _op_in(incident: Incident) -> str:
    kind = f" ({incident.module_type})" if incident.module_type else ""
    inside = f" in {incident.module}{kind}" if incident.module else " outside the watched modules"
    return f"{incident.op}{inside}, {incident.phase}" if incident.op else ""
