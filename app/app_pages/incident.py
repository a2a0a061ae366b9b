"""Incident: where was the bad value born, why, and what cures it?"""

from __future__ import annotations

import streamlit as st

from ampscope.analysis.origin.closeup import Closeup
from ampscope.analysis.overview.overview import Overview
from ampscope.analysis.results import Diagnosis, Finding, Incident
from ampscope.report.figures.magnitudes import magnitudes
from ampscope.report.figures.over_steps import clipped_stack
from ampscope.report.figures.path_graph import path_graph
from ampscope.report.html.figures.magnitudes import magnitudes_html
from ampscope.report.html.figures.path_graph import path_graph_html
from ampscope.report.html.parts.evidence import found, operand_table
from ampscope.report.html.parts.incident import tripped_heading, tripped_html
from ampscope.report.html.parts.last_good import last_good_html
from ampscope.report.html.parts.replays import replay_table
from ampscope.report.html.source import listing
from ampscope.report.wording.clip_words import clipped_norm
from ampscope.trace.vocabulary import Cause, Severity
from blocks.basics.figure import show_figure
from blocks.basics.page_links import link_row, rank_of, to_overview, to_precision, to_replay, to_scale, to_usage
from blocks.basics.text import heading, paragraph, title
from blocks.basics.watch_line import watch_line
from blocks.choices.select_box import choose
from blocks.verdict.diagnosis_card import item_card
from blocks.verdict.item_list import item_line
from blocks.verdict.remedy_list import remedy_list
from blocks.verdict.repro_download import repro_download
from charts.stack import stack_figure
from data.current_run import current_run
from data.named_items import Item, named_items
from data.run_results import closeup_of, diagnosis_of, last_good_of, overview_of
from state.query_params import remember_params


def incident_page() -> None:
    run = current_run()
    diagnosis = diagnosis_of(run)
    title("Incident", diagnosis.run.name)  # of its own rank, so there is none to choose
    items = named_items(diagnosis)
    if not items:
        paragraph("Nothing went wrong in this run, and no mistake in its loop was found.")
        return
    name = choose("incident", "What to look at", list(items), lambda name: item_line(items[name]), named=run.is_open)
    item, closeup = items[name], closeup_of(run, name)
    remember_params(step=item.step, rank=rank_of(item))
    item_card(item)
    ways_onward(item)
    cure_and_line(item, closeup)
    if item.cause is Cause.MISUSE_CLIP_BEFORE_UNSCALE:
        clipped(overview_of(run, None), item)
    if isinstance(item, Incident):
        if item.cause is Cause.UNKNOWN and not item.path:
            how_to_see_its_origin(diagnosis)
        section("Since the last good step", last_good_html(last_good_of(run, name)))
        evidence(item, closeup)
        if item.op and not item.cause.is_benign:
            heading("Take it along")
            repro_download(run, item, diagnosis)


def ways_onward(item: Item) -> None:
    """Links to what else there is to see of it."""
    with link_row():
        if isinstance(item, Finding):
            to_usage("All that was checked")
        elif item.path and item.traced:
            to_replay(item.step, item.traced, item.path[0].seq, "Replay the step from its origin", rank=rank_of(item))
            to_precision(item.module, item.step, item.traced, rank=rank_of(item))
        to_scale(item.step, rank=rank_of(item))
        to_overview()


def cure_and_line(item: Item, closeup: Closeup) -> None:
    """What to change, and the line it is about; code has the width of the page."""
    if item.remedies:
        heading("What to change")
        remedy_list(item)
    if item.source is not None and len(closeup.lines) > 1:
        heading("Your line")
        st.html(listing(closeup.lines, item.source, calm=item.severity is Severity.INFO))
        st.caption("The lines around it are those whose ops were traced.")


def clipped(seen: Overview, item: Item) -> None:
    """What the steps show of it, where they do."""
    if words := clipped_norm(seen, item.step):
        heading("What it did")
        paragraph(words)
        show_figure(stack_figure(clipped_stack(seen)), key="clipped")


def how_to_see_its_origin(diagnosis: Diagnosis) -> None:
    """What to do where no trace shows the origin."""
    heading("How to see where it begins")
    paragraph("Trace the steps as they run, so that the next such step is seen op by op whatever its replay does:")
    watch_line(diagnosis, "every=1")


def evidence(incident: Incident, closeup: Closeup) -> None:
    """The way of the bad value, what was tried, what the op read and wrote, and how far all this can be trusted."""
    operands = (*incident.inputs, *incident.outputs)
    section("From the origin to what it reached", path_graph_html(path_graph(incident, closeup)))
    section("What was tried on this step", replay_table(incident.tried, incident.trigger))
    section("Magnitudes against what each dtype can hold", magnitudes_html(magnitudes(operands, incident.tried)))
    section("What the op read and wrote", operand_table(operands))
    if sentences := list(found(incident)):
        heading("How it was found")
        paragraph(" ".join(sentences))
    section(tripped_heading(incident.trigger), tripped_html(incident.tripped))


def section(title: str, html: str) -> None:
    """A section, where there is something to show in it."""
    if html:
        heading(title)
        st.html(html)


incident_page()
