"""A heat map whose cells can be picked with a click or the keyboard; the course of a row shows at the pointer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import streamlit as st

from ampscope.report.figures.heat_map_figure import HeatFigure
from blocks.components.declared import declared

_MAP = declared(__file__, "heat_map", '<div class="map" role="group" tabindex="0"></div>')


def heat_map(
    key: str, figure: HeatFigure, on_pick: Callable[[str, int], None], *, chosen: str = "", curve: str, with_end: bool
) -> None:
    """The figure; ``on_pick`` gets a place's key and the step that its cell stands for.

    Args:
        key: The element's.
        figure: What to draw.
        on_pick: Called before the page is drawn again.
        chosen: The key of the place whose cells are marked.
        curve: What the small curve at the pointer shows, in words.
        with_end: Whether the end of the dtype is drawn in it.
    """

    def picked() -> None:
        state = st.session_state.get(key)
        place, _, column = str(state.get("picked") if state else "").partition(" ")
        if place in figure.keys and column.isdecimal() and int(column) < len(figure.steps):
            on_pick(place, figure.steps[int(column)])

    told = asdict(figure)
    told["rows"] = tuple(told["rows"])  # of a list, Streamlit asks pandas whether it is a table
    _MAP(key=key, data={**told, "chosen": chosen, "curve": curve, "withEnd": with_end}, on_picked_change=picked)
