"""The heat map of headroom by module and sampled step."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from ampscope.analysis.precision.ranges.heat_map import HeatMap, Measure, View
from ampscope.report.figures.heat_map import heat_figure
from blocks.basics.figure import figure
from blocks.basics.room import keep_room
from blocks.components.heat_map.heat_map import heat_map
from data.run_results import heat_map_of, measured_of
from data.run_snapshot import RunSnapshot

#: Pixels: a row, and the steps and the key below them.
_ROW, _KEY = 20, 44
_CURVES = {
    Measure.HEADROOM: "its headroom over the steps; at the top it overflows",
    Measure.UNDERFLOW: "its distance to underflow over the steps; at the top all is subnormal",
    Measure.SUBNORMAL: "its share of subnormal values over the steps",
}


def module_map(
    run: RunSnapshot, key: str, title: str, on_pick: Callable[[str, int | None], None], view: View, *, chosen: str = ""
) -> HeatMap:
    """The heat map, of which a click on a cell picks the place that is closest there.

    Args:
        run: The run.
        key: The element's.
        title: What it shows, in a word or two.
        on_pick: Gets the place's key, and the step.
        view: What it shows.
        chosen: The key of the place whose cells are marked.
    """
    seen = heat_map_of(run, view)
    drawn = heat_figure(seen, measured_of(run), as_tree=not view.closest_first)
    if not drawn.rows:
        return seen
    end = view.measure is not Measure.SUBNORMAL
    keep_room(key, _ROW * len(drawn.rows) + _KEY)
    with figure(key, title, drawn.label):
        heat_map(key, drawn, on_pick, chosen=chosen, curve=_CURVES[view.measure], with_end=end)
    if drawn.left_out:
        st.caption(f"Not shown: {drawn.left_out}.")
    return seen
