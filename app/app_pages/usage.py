"""Usage: does the loop use autocast and the scaler as they are meant to be used?"""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.origin.closeup import Closeup
from ampscope.analysis.results import Finding
from ampscope.analysis.usage.usage_checks import Check, usage_checks
from ampscope.report.html.parts.checks import checks_html
from ampscope.report.html.source import listing
from ampscope.report.numbers import count
from blocks.basics.page_links import link_row, rank_of, to_incident, to_scale
from blocks.basics.text import good, heading, paragraph
from blocks.choices.page_head import page_head
from blocks.verdict.diagnosis_card import item_card
from blocks.verdict.remedy_list import remedy_list
from data.current_run import current_run
from data.named_items import named_items
from data.run_results import closeup_of, diagnosis_of


def usage_page() -> None:
    run = current_run()
    diagnosis = diagnosis_of(run)
    findings = {name: item for name, item in named_items(diagnosis).items() if isinstance(item, Finding)}
    run = page_head("Usage", run, diagnosis)
    if not diagnosis.run.steps and not findings:
        paragraph("No optimizer step has been recorded yet, so there is no loop to judge.")
        return
    checks = usage_checks(diagnosis)
    summary(len(findings), checks)
    for name, finding in findings.items():
        mistake(name, finding, closeup_of(run, name))
    heading("What was checked")
    st.html(checks_html(checks))


def summary(found: int, checks: tuple[Check, ...]) -> None:
    """The page in one sentence."""
    if found:
        paragraph(f"{count(found, 'mistake').capitalize()} in how the loop uses autocast and the scaler.")
    else:
        checked = count(sum(check.applies for check in checks), "check")
        good("Nothing wrong", f"{checked} of the loop found no mistake.")


def mistake(name: str, finding: Finding, closeup: Closeup) -> None:
    """One mistake: where, why it matters, and the fix beside the line."""
    item_card(finding)
    left, right = st.columns([1, 1], gap="large")
    with left:
        remedy_list(finding)
    with right:
        if finding.source is not None and len(closeup.lines) > 1:
            st.html(listing(closeup.lines, finding.source))
        with link_row():
            to_incident(name, "This mistake alone", rank=rank_of(finding))
            to_scale(finding.step, rank=rank_of(finding))


usage_page()
