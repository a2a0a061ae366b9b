"""Ranges: how close do values come to the ends of their dtypes, where, and where is that going?"""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from ampscope.analysis.precision.ranges.heat_map import HeatMap, Measure, View, groups
from ampscope.analysis.precision.ranges.places import ValueKind
from ampscope.analysis.precision.ranges.ranges import Ranges
from ampscope.report.figures.heat_map_figure import GROUPS, MEASURES
from ampscope.report.numbers import count
from ampscope.report.precision_words import closest_sentence, sampled_sentence
from blocks.choices import choose
from blocks.live_part import live_part
from blocks.recorded_ranges import closest_table, module_map, pick, picked_place, place_view
from blocks.text import heading, how_to_trace, paragraph, title
from data.run_results import closest_of, diagnosis_of, heat_map_of, measured_of, place_of
from data.run_snapshot import RunSnapshot, current_run
from state import write_params

#: Rows of the heat map.
_ROWS = 48
_ORDERS = {"tree": "as a tree of modules", "closest": "by how close they came"}
#: Levels of modules offered one by one.
_LEVELS = 10
#: Of a box, in pixels: choices are read whole; four boxes stand side by side in a window of 1,400, two in one of 900.
_WIDE, _BOX = 290, 222


def ranges_page() -> None:
    run = current_run()
    diagnosis = diagnosis_of(run)
    title("Ranges")
    if not closest_of(run).rows:
        how_to_trace(diagnosis)
        live_part(until_traced)
        return
    live_part(explorer)


def until_traced(run: RunSnapshot) -> None:
    """Draw the page again once the first step was recorded op by op."""
    if closest_of(run).rows:
        st.rerun()


def explorer(run: RunSnapshot) -> None:
    """All that a click changes."""
    seen = closest_of(run)
    paragraph(closest_sentence(seen), 600)
    st.caption(sampled_sentence(seen))
    key, step = picked_place(measured_of(run), seen.rows[0].key)
    heading("Modules by sampled step")
    shown = with_choices(run, seen, key)
    if not shown.rows:
        paragraph("Of these, nothing was measured that can grow.")
    st.caption(
        "Point at a cell for what is closest in it, click on it to see that close up; a row shows the closest of all "
        "that is below it."
    )
    detail = place_of(run, key, step)
    if detail is not None:
        place_view(detail)
    heading("Closest to overflow")
    closest_table(seen, pick)
    write_params()


def with_choices(run: RunSnapshot, seen: Ranges, key: str) -> HeatMap:
    """The heat map below boxes that say of what, in which order, and how deep."""
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        group = ValueKind(
            choose("values", "Values", offered(run, seen), lambda name: GROUPS[ValueKind(name)], width=_WIDE)
        )
        measure = Measure(
            choose("tells", "A cell tells", list(Measure), lambda name: MEASURES[Measure(name)][0], width=_BOX)
        )
        order = choose("order", "Rows", list(_ORDERS), _ORDERS.__getitem__, width=_BOX)
        view = View(group=group, measure=measure, closest_first=order == "closest", most=_ROWS)
        depth = levels(heat_map_of(run, view))
    return module_map(run, "ranges-map", "Modules by sampled step", pick, replace(view, depth=depth), chosen=key)


def offered(run: RunSnapshot, seen: Ranges) -> list[str]:
    """The kinds of values that were measured, that of the closest first."""
    closest = next((each.place.group for each in measured_of(run).places if each.place.key == seen.rows[0].key), None)
    return sorted(groups(measured_of(run)), key=lambda group: group != closest)


def levels(fitting: HeatMap) -> int | None:
    """How many levels of modules have rows of their own; None for as many as fit."""
    depths = sorted(range(1, min(fitting.deepest, _LEVELS) + 1), key=lambda depth: (depth != fitting.depth, depth))
    if len(depths) < 2:
        return None
    words = {str(depth): count(depth, "level") if depth < fitting.deepest else "every module" for depth in depths}
    return int(choose("levels", "Detail", list(words), words.__getitem__, width=_BOX))


ranges_page()
