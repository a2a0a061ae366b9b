"""Usage: does the loop use autocast and the scaler as they are meant to be used?"""

from __future__ import annotations

import streamlit as st
from blocks.basics.links import link_row, to_incident, to_scale
from blocks.basics.notes import good, heading, page_head, paragraph
from blocks.verdict.card import item_card
from blocks.verdict.items import items
from blocks.verdict.remedies import remedies
from data import loader
from data.takeaways import surroundings

from ampscope.analysis.results import Finding
from ampscope.analysis.usage.usage_checks import Check, usage_checks
from ampscope.report import numbers
from ampscope.report.html.parts.checks import checks_html
from ampscope.report.html.source import listing


def show_finding(name: str, finding: Finding) -> None:
    """One mistake: where, why it matters, and the fix beside the line."""
    item_card(finding)
    seen = surroundings(run, name, finding)
    left, right = st.columns([1, 1], gap="large")
    with left:
        remedies(finding)
    with right:
        if finding.source is not None and len(seen.lines) > 1:
            st.html(listing(seen.lines, finding.source))
        with link_row():
            to_incident(name, "This mistake alone")
            to_scale(finding.step)


def summary(found: int, checks: tuple[Check, ...]) -> None:
    """The page in one sentence."""
    if found:
        paragraph(f"{numbers.count(found, 'mistake').capitalize()} in how the loop uses autocast and the scaler.")
    else:
        checked = numbers.count(sum(check.applies for check in checks), "check")
        good("Nothing wrong", f"{checked} of the loop found no mistake.")


run = loader.current()
diagnosis = run.diagnosis()
named = {name: item for name, item in items(diagnosis).items() if isinstance(item, Finding)}
checks = usage_checks(diagnosis)
page_head("Usage", diagnosis.run.name)
if not diagnosis.run.steps and not named:
    paragraph("No optimizer step has been recorded yet, so there is no loop to judge.")
    st.stop()
summary(len(named), checks)
for name, finding in named.items():
    show_finding(name, finding)
heading("What was checked")
st.html(checks_html(checks))
