"""Incident: where was the bad value born, why, and what cures it?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import streamlit as st

from ampscope.analysis.overview.overview import Overview
from ampscope.analysis.results import Diagnosis, Finding, Incident, LastGood, SourceLine
from ampscope.analysis.step_graph import IncidentSurroundings
from ampscope.report.diagnosis_words import clipped_norm
from ampscope.report.figures.magnitudes_figure import LABEL as MAGNITUDES
from ampscope.report.figures.magnitudes_figure import magnitudes
from ampscope.report.figures.path_graph import PathGraph, path_graph
from ampscope.report.figures.step_figures import clipped_stack
from ampscope.report.html.incident_sections import (
    found,
    move_rows,
    operand_rows,
    replay_rows,
    tripped_heading,
    tripped_html,
)
from ampscope.report.html.markup import as_source, listing
from ampscope.report.html.ops_svg import PathWays, magnitudes_html, path_graph_html
from ampscope.report.html.tables_html import TableRows
from ampscope.trace.vocabulary import Cause, Severity
from blocks.choices import choose, tabs
from blocks.figure import figure, show_figure
from blocks.page_links import link_row, rank_of, to_overview, to_precision, to_replay, to_scale, to_usage
from blocks.table import table
from blocks.text import heading, paragraph, title, watch_line
from blocks.verdict import (
    before_it,
    item_card,
    item_line,
    parameter_way,
    path_ways,
    rank_chips,
    remedy_list,
    repro_download,
)
from charts import stack_figure
from data.run_results import Item, closeup_of, diagnosis_of, last_good_of, named_items, overview_of, scale_history_of
from data.run_snapshot import RunSnapshot, current_run
from state import remember_params


def incident_page() -> None:
    run = current_run()
    diagnosis = diagnosis_of(run)
    title("Incident")
    items = named_items(diagnosis)
    if not items:
        paragraph("Nothing went wrong in this run, and no mistake in its loop was found.")
        to_overview()
        return
    name = choose("incident", "What to look at", list(items), lambda name: item_line(items[name]), named=run.is_open)
    item = items[name]
    remember_params(step=item.step, rank=rank_of(item))
    item_card(item, ranks=rank_chips(item) if isinstance(item, Incident) else "")
    ways_onward(run, item)
    tabs(f"incident-tabs {name}", parts_of(replace(run, rank=item.rank), diagnosis, name, item))


def parts_of(run: RunSnapshot, diagnosis: Diagnosis, name: str, item: Item) -> dict[str, Callable[[], None]]:
    """Returns the parts of an incident or finding that have something to show, by heading."""
    closeup = closeup_of(run, name)
    parts: dict[str, Callable[[], None]] = {}
    parts["What happened"] = partial(what_happened, run, diagnosis, name, item, closeup)
    if item.remedies:
        parts["What to change"] = partial(remedy_list, item)
    if not isinstance(item, Incident):
        return parts
    if (graph := path_graph(item, closeup)) is not None:
        parts["The path"] = partial(way_of_the_value, run, item, graph)
    if item.tried:
        parts["What was tried"] = partial(as_table, "What was tried", replay_rows(item.tried, item.trigger))
    if item.inputs or item.outputs:
        parts["Evidence"] = partial(evidence, item)
    if item.op and not item.cause.is_benign:
        parts["Take it along"] = partial(repro_download, run, item, diagnosis)
    return parts


def ways_onward(run: RunSnapshot, item: Item) -> None:
    """Shows links to what else there is to see of an incident or finding."""
    with link_row():
        if isinstance(item, Finding):
            to_usage("All that was checked")
        elif item.path and item.traced:
            to_replay(item.step, item.traced, item.path[0].seq, "Replay the step from its origin", rank=rank_of(item))
            to_precision(item.module, item.step, item.traced, rank=rank_of(item))
        if scale_history_of(run, None).is_scaled:
            to_scale(item.step, rank=rank_of(item))
        to_overview()


def what_happened(run: RunSnapshot, diagnosis: Diagnosis, name: str, item: Item, closeup: IncidentSurroundings) -> None:
    """The line, what came before it, and how all this is known."""
    if item.source is not None:
        your_line(item, item.source, closeup)
    if item.cause is Cause.MISUSE_CLIP_BEFORE_UNSCALE:
        clipped(overview_of(run, None), item)
    if not isinstance(item, Incident):
        return
    if diagnosis.since and item == diagnosis.primary:
        heading("Since then")
        paragraph(diagnosis.since)
    if item.cause is Cause.UNKNOWN and not item.path:
        how_to_see_its_origin(diagnosis)
    since_last_good(last_good_of(run, name))
    before_it(run, item, closeup)
    if sentences := list(found(item)):
        heading("How it was found")
        paragraph(" ".join(sentences))
    if item.tripped:
        heading(tripped_heading(item.trigger))
        st.html(tripped_html(item.tripped, parameter_way(run, item)))


def your_line(item: Item, source: SourceLine, closeup: IncidentSurroundings) -> None:
    """The line among those around it, and its place to copy."""
    heading("Your line")
    st.code(as_source(f"{source.file}:{source.line}", 400), language=None, wrap_lines=True)
    if len(closeup.lines) > 1:
        st.html(listing(closeup.lines, source, calm=item.severity is Severity.INFO, placed=False))
        st.caption("The lines around it are those whose ops were traced.")


def clipped(seen: Overview, item: Item) -> None:
    """Shows what clipping did to the gradient norms, where the steps tell."""
    if words := clipped_norm(seen, item.step):
        heading("What it did")
        paragraph(words)
        stack = clipped_stack(seen)
        show_figure(stack_figure(stack), "clipped", "What clipping did", stack.label)


def how_to_see_its_origin(diagnosis: Diagnosis) -> None:
    """Says what to do where no trace shows the origin."""
    heading("How to see where it begins")
    paragraph("Trace the steps as they run, so that the next such step is seen op by op whatever its replay does:")
    watch_line(diagnosis, "every=1")


def way_of_the_value(run: RunSnapshot, incident: Incident, graph: PathGraph) -> None:
    """From the origin to what it reached."""
    linked = incident.traced and not incident.cause.is_benign
    label = "The ops from the origin to what it reached, forward and backward, with what each gave."
    with figure("path", "The path of the value", label):
        st.html(path_graph_html(graph, path_ways(run, incident) if linked else PathWays(copies=True)))
    if linked:
        st.caption("An op leads to Replay, a module to Precision, a range to its course over the steps.")


def evidence(incident: Incident) -> None:
    """Shows the values that the op read and wrote."""
    operands = (*incident.inputs, *incident.outputs)
    if drawn := magnitudes(operands, incident.tried):
        heading("Magnitudes against what each dtype can hold")
        with figure("magnitudes", "Magnitudes against what each dtype can hold", MAGNITUDES):
            st.html(magnitudes_html(drawn))
    heading("What the op read and wrote")
    as_table("What the op read and wrote", operand_rows(operands))


def since_last_good(told: LastGood | None) -> None:
    """When it was last good, and what has moved since."""
    if told is None:
        return
    heading("Since the last good step")
    paragraph(told.summary)
    if told.moves:
        as_table("What has moved since the last good step", move_rows(told))


def as_table(label: str, found: TableRows) -> None:
    """The rows in the table of every page."""
    table(label, found.columns, found.rows, numeric=found.numeric)


incident_page()
