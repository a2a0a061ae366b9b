"""Incident: where was the bad value born, why, and what cures it?"""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st
from blocks.basics.links import link_row, to_overview, to_precision, to_replay, to_scale, to_usage
from blocks.basics.notes import heading, page_head, paragraph
from blocks.verdict.card import item_card
from blocks.verdict.items import item_line, items
from blocks.verdict.remedies import remedies
from blocks.verdict.repro import repro
from data import loader
from data.takeaways import surroundings
from state.address import remember
from state.choice import choose

from ampscope.analysis.origin.closeup import Closeup
from ampscope.analysis.results import Finding, Incident
from ampscope.report.figures.magnitudes import magnitudes
from ampscope.report.figures.path_graph import path_graph
from ampscope.report.html.figures.magnitudes import magnitudes_html
from ampscope.report.html.figures.path_graph import path_graph_html
from ampscope.report.html.parts.evidence import found, operand_table
from ampscope.report.html.parts.incident import tripped_html
from ampscope.report.html.parts.replays import replay_table
from ampscope.report.html.source import listing
from ampscope.trace.vocabulary import Cause, Severity


def show_cure(item: Incident | Finding, seen: Closeup) -> None:
    """What to change, beside the line it is about."""
    has_lines = item.source is not None and len(seen.lines) > 1
    if not item.remedies and not has_lines:
        return
    left, right = st.columns([1, 1], gap="large") if item.remedies and has_lines else (st.container(), st.container())
    if item.remedies:
        with left:
            heading("What to change")
            remedies(item)
    if item.source is not None and has_lines:
        with right:
            heading("Your line")
            st.html(listing(seen.lines, item.source, calm=item.severity is Severity.INFO))
            st.caption("The lines around it are those whose ops were traced.")


def show_ways(item: Incident | Finding) -> None:
    """Links to what else there is to see of it."""
    with link_row():
        if isinstance(item, Finding):
            to_usage("All that was checked")
        elif item.path and item.traced:
            to_replay(item.step, item.traced, item.path[0].seq, "Replay the step from its origin")
            to_precision(item.module, item.step, item.traced)
        to_scale(item.step)
        to_overview()


def show_block(title: str, html: str) -> None:
    """A section, where there is something to show in it."""
    if html:
        heading(title)
        st.html(html)


def show_evidence(incident: Incident, seen: Closeup) -> None:
    """The way of the bad value, what was tried, and what the op read and wrote."""
    operands = (*incident.inputs, *incident.outputs)
    show_block("From the origin to what it reached", path_graph_html(path_graph(incident, seen)))
    show_block("What was tried on this step", replay_table(incident.tried))
    show_block("Magnitudes against what each dtype can hold", magnitudes_html(magnitudes(operands, incident.tried)))
    show_block("What the op read and wrote", operand_table(operands))
    show_found(list(found(incident)))
    show_block("Gradients that were not finite", tripped_html(incident.tripped))


def show_how_to_see_more() -> None:
    """What to do where no trace shows the origin."""
    heading("How to see where it begins")
    paragraph("Trace the steps as they run, so that the next such step is seen op by op whatever its replay does:")
    st.code("ampscope.watch(model, scaler, every=1)", language="python")


def show_found(sentences: Sequence[str]) -> None:
    """How it was noticed, and how far what is shown can be trusted."""
    if sentences:
        heading("How it was found")
        paragraph(" ".join(sentences))


run = loader.current()
diagnosis = run.diagnosis()
named = items(diagnosis)
page_head("Incident", diagnosis.run.name)
if not named:
    paragraph("Nothing went wrong in this run, and no mistake in its loop was found.")
    st.stop()
name = choose("incident", "What to look at", list(named), lambda name: item_line(named[name]))
item = named[name]
remember(step=item.step)
seen = surroundings(run, name, item)
item_card(item)
show_ways(item)
show_cure(item, seen)
if isinstance(item, Incident):
    if item.cause is Cause.UNKNOWN and not item.path:
        show_how_to_see_more()
    show_evidence(item, seen)
    if item.op and not item.cause.is_benign:
        heading("Take it along")
        repro(run, item)
