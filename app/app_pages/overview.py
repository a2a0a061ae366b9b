"""Overview: is the run healthy, and if not, what to change?"""

from __future__ import annotations

from functools import partial

import streamlit as st

from ampscope.analysis.precision.ranges.heat_map import View
from ampscope.analysis.results import Incident
from ampscope.analysis.scale.scale_history import scale_story
from ampscope.analysis.usage.mistakes import usage_checks
from ampscope.report.figures.step_figures import SEVERITY_LANES, SKIPPED, timeline_stack
from ampscope.report.html.cards import healed_html, run_tiles, scale_html, thinned_note
from ampscope.report.numbers import count
from ampscope.report.precision_words import closest_sentence
from ampscope.trace.vocabulary import Verdict
from blocks.choices import choose_optimizer
from blocks.figure import clickable_figure
from blocks.live_part import live_part
from blocks.page_links import (
    rank_of,
    switch_to_incident,
    switch_to_ranges,
    switch_to_scale,
    to_ranges,
    to_ranks,
    to_replay,
    to_scale,
    to_usage,
)
from blocks.recorded_ranges import module_map, pick, take_pick
from blocks.text import heading, paragraph, tiles, title
from blocks.verdict import diagnosis_card, item_link, item_list
from charts import stack_figure
from data.run_results import (
    closest_of,
    diagnosis_of,
    html_report,
    incident_at,
    named_items,
    overview_of,
    scale_history_of,
)
from data.run_snapshot import RunSnapshot, current_run

#: Nothing is broken: what is to be seen first is how far it is from that.
_CALM = (Verdict.HEALTHY, Verdict.AT_RISK, Verdict.PARTLY_OBSERVED)
#: Rows of the heat map: modules, not what holds them.
_ROWS, _DEEP = 8, 100


def overview_page() -> None:
    run = current_run()
    title("Overview")
    live_part(verdict)
    landing = st.container()
    live_part(partial(history, optimizer=choose_optimizer(overview_of(run, None).optimizers)))
    live_part(everything_noticed)
    if diagnosis_of(run).verdict in _CALM:
        with landing:
            live_part(headroom)  # takes longest on a large run: drawn when all else is there
            live_part(scale_and_checks)


def verdict(run: RunSnapshot) -> None:
    """Shows the verdict's card, and links to where it leads."""
    diagnosis = diagnosis_of(run)
    diagnosis_card(diagnosis)
    if diagnosis.note:
        paragraph(diagnosis.note)
    if unwell := scale_html(diagnosis):
        st.html(unwell)
    if diagnosis.since or diagnosis.cures:
        st.html(healed_html(diagnosis))
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        primary = diagnosis.primary
        if primary is not None:
            item_link(*next(iter(named_items(diagnosis).items())), "**Look at it closely**")
        if isinstance(primary, Incident) and primary.path and primary.traced:
            to_replay(primary.step, primary.traced, primary.path[0].seq, "Replay it", rank=rank_of(primary))
        if primary is not None and overview_of(run, None).scale is not None:
            to_scale(primary.step, "The loss scale then", rank=rank_of(primary))
        if diagnosis.run.steps and diagnosis.verdict not in _CALM:
            to_usage()
        if diagnosis.run.world > 1:
            to_ranks()
        st.download_button(
            "Report to send on",
            partial(html_report, run),
            "report.html",
            "text/html",
            type="tertiary",
            icon=":material/download:",
            on_click="ignore",
            help="All of this as one HTML file that needs no server and no network",
        )


def headroom(run: RunSnapshot) -> None:
    """Shows which modules come closest to overflow, and when."""
    if (picked := take_pick()) is not None:
        switch_to_ranges(*picked)
    seen = closest_of(run)
    if not seen.rows:
        return
    heading("Headroom to overflow")
    paragraph(closest_sentence(seen), 600)
    module_map(run, "overview-map", "Headroom to overflow", pick, View(depth=_DEEP, closest_first=True, most=_ROWS))
    to_ranges("All ranges, with forecasts and histograms")


def scale_and_checks(run: RunSnapshot) -> None:
    """The loss scale in a sentence or two, and what was checked of the loop."""
    if story := scale_story(scale_history_of(run, None)):
        heading("The loss scale")
        paragraph(" ".join(story))
    diagnosis = diagnosis_of(run)
    if diagnosis.run.steps:
        checks = usage_checks(diagnosis)
        passed, applies = sum(each.passed for each in checks), sum(each.applies for each in checks)
        all_of_them = "All" if passed == applies else f"{passed} of"
        heading("What was checked")
        paragraph(f"{all_of_them} {count(applies, 'check')} of the loop found no mistake.")
        to_usage("All that was checked")


def history(run: RunSnapshot, optimizer: int | None) -> None:
    """The tiles and the time line."""
    overview, diagnosis = overview_of(run, optimizer), diagnosis_of(run)
    tiles(run_tiles(overview, diagnosis))
    heading("Time line")
    if not overview.steps:
        paragraph("No optimizer step has been recorded yet.")
        return
    stack = timeline_stack(overview, list(named_items(diagnosis).values()))
    clicked = clickable_figure(stack_figure(stack), "timeline", "Time line", stack.label)
    if overview.thinned:
        st.caption(thinned_note(overview))
    st.caption("Drag to zoom in, double-click to zoom out, click a mark to see what it stands for.")
    if clicked is not None:
        follow_mark(run, *clicked)


def follow_mark(run: RunSnapshot, step: int, lane: str) -> None:
    """Leave for what a mark of the time line stands for: what was noticed there, else what the scale did then."""
    diagnosis = diagnosis_of(run)
    items = named_items(diagnosis).items()
    marked = (one for one in items if one[1].step == step and SEVERITY_LANES[one[1].severity][0] == lane)
    found = next(marked, None if lane == SKIPPED else incident_at(diagnosis, step, run.rank))
    if found is not None:
        switch_to_incident(found[0])
    elif overview_of(run, None).scale is not None:
        switch_to_scale(step)


def everything_noticed(run: RunSnapshot) -> None:
    """Incidents and findings, each a link."""
    if items := named_items(diagnosis_of(run)):
        heading("Everything noticed")
        item_list(items)


overview_page()
