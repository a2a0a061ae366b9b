"""Usage: does the loop use autocast and the scaler as they are meant to be used?"""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.results import Finding
from ampscope.analysis.usage.mistakes import UsageCheck, usage_checks
from ampscope.report.html.cards import checks_html
from ampscope.report.html.markup import listing
from ampscope.report.numbers import count
from ampscope.trace.vocabulary import Severity
from blocks.page_links import link_row, rank_of, to_incident, to_scale
from blocks.text import good, heading, paragraph, title
from blocks.verdict import item_card, remedy_list
from data.run_results import closeup_of, diagnosis_of, named_items, scale_history_of
from data.run_snapshot import RunSnapshot, current_run


def usage_page() -> None:
    run = current_run()
    diagnosis = diagnosis_of(run)
    findings = {name: item for name, item in named_items(diagnosis).items() if isinstance(item, Finding)}
    title("Usage")
    if not diagnosis.run.steps and not findings:
        paragraph("No optimizer step has been recorded yet, so there is no loop to judge.")
        return
    checks = usage_checks(diagnosis)
    summary(sum(each.found for each in checks), checks)
    for name, finding in findings.items():
        mistake(run, name, finding)
    heading("What was checked")
    st.html(checks_html(checks))
    st.caption("A tick means that no step shows the mistake; the loop may do nothing of the kind at all.")


def summary(found: int, checks: tuple[UsageCheck, ...]) -> None:
    """The page in one sentence."""
    if found:
        paragraph(f"{count(found, 'mistake').capitalize()} in how the loop uses autocast and the scaler.")
    else:
        checked = count(sum(check.passed for check in checks), "check")
        good("Nothing wrong", f"{checked} of the loop found no mistake.")


def mistake(run: RunSnapshot, name: str, finding: Finding) -> None:
    """One mistake: where, why it matters, the line among those around it, and the fix."""
    item_card(finding)
    closeup = closeup_of(run, name)
    if finding.source is not None and len(closeup.lines) > 1:
        st.html(listing(closeup.lines, finding.source, calm=finding.severity is Severity.INFO))
    remedy_list(finding)
    with link_row():
        to_incident(name, "This mistake alone", rank=rank_of(finding))
        if scale_history_of(run, None).is_scaled:
            to_scale(finding.step, rank=rank_of(finding))


usage_page()
