"""Puts a figure on the page, each with the same foot; those over steps show the same range of them, by the address."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import plotly.graph_objects as go
import streamlit as st

from ampscope.report.safe_text import short
from ampscope.trace.read.find import told_name
from blocks.components.figure_foot import FigureFoot, figure_foot
from data.run_snapshot import current_run
from state import get_param, set_params, write_params

#: The foot saves a figure, not Plotly's bar.
CONFIG = {"displayModeBar": False, "displaylogo": False, "scrollZoom": False, "showTips": False}
_RANGE = "range"


@contextmanager
def figure(key: str, title: str, label: str) -> Iterator[None]:
    """Makes one figure, which can be saved as a picture, of what is drawn within, its key and legend included.

    Args:
        key: The figure's; of its own on the page.
        title: What it shows, in a word or two.
        label: The same in a sentence, for those who do not see it.
    """
    with st.container(key=f"figure-{key}", gap="xxsmall"):
        yield
        figure_foot(_foot(key, title, label), _choose)


def show_figure(drawn: go.Figure, key: str, title: str, label: str, *, legend: str = "") -> None:
    """The figure in the theme of the reader, as wide as the page; a zoom outlives a redrawing and holds on all pages.

    Args:
        drawn: The figure; its horizontal axes are steps.
        key: The element's.
        title: What it shows, in a word or two.
        label: The same in a sentence, for those who do not see it.
        legend: HTML above it.
    """
    _at_range(drawn, key)
    with st.container(key=f"figure-{key}", gap="xxsmall"):
        if legend:
            st.html(legend)
        st.plotly_chart(drawn, width="stretch", config=CONFIG, key=key)
        figure_foot(_foot(key, title, label, drawn), _choose)


def clickable_figure(drawn: go.Figure, key: str, title: str, label: str) -> tuple[int, str] | None:
    """Shows a figure as `show_figure` does; returns the step and lane of a clicked mark, None without a click."""
    _at_range(drawn, key)
    with st.container(key=f"figure-{key}", gap="xxsmall"):
        state = st.plotly_chart(
            drawn, width="stretch", config=CONFIG, key=key, on_select="rerun", selection_mode=("points",)
        )
        figure_foot(_foot(key, title, label, drawn, clickable=True), _choose)
    for point in state["selection"]["points"]:
        step, told = point.get("x"), point.get("customdata")
        if isinstance(step, int | float):
            return int(step), str(told[1]) if isinstance(told, list) else ""
    return None


def asked_range() -> tuple[int, int] | None:
    """The first and the last step that the address asks for; None for all, or where something else stands there."""
    found = re.fullmatch(r"(\d{1,15})-(\d{1,15})", get_param(_RANGE) or "", re.ASCII)
    return (int(found[1]), int(found[2])) if found and int(found[1]) < int(found[2]) else None


def _at_range(drawn: go.Figure, key: str) -> None:
    """Has the figure show the steps that were asked for, where it has any of them."""
    drawn.update_layout(uirevision=key)
    if (asked := _shown(drawn)) is not None:
        drawn.update_xaxes(range=list(asked))
    drawn.update_xaxes(uirevision=f"{key} {asked}")


def _shown(drawn: go.Figure) -> tuple[int, int] | None:
    asked, (low, high) = asked_range(), drawn.layout.xaxis.range
    return asked if asked is not None and asked[0] <= high and asked[1] >= low else None


def _foot(key: str, title: str, label: str, drawn: go.Figure | None = None, *, clickable: bool = False) -> FigureFoot:
    run = current_run()
    folder = told_name(Path(run.path))
    asked = asked_range()
    is_part = drawn is not None and asked is not None and tuple(drawn.layout.xaxis.range) == asked
    return FigureFoot(
        figure=key,
        title=title,
        under=short(f"{folder}, rank {run.rank:,}" if run.world.is_shared else folder, 100),
        label=label,
        name=re.sub(r"\W+", "-", f"{folder} {key}", flags=re.ASCII).strip("-"),
        steps=drawn is not None,
        range=f"Steps {asked[0]:,} to {asked[1]:,}" if asked is not None and is_part else "",
        clickable=clickable,
    )


def _choose(told: str) -> None:
    """A zoom's two ends, or ``all``."""
    ends = [float(one) for one in told.split()] if told != "all" else []
    is_range = len(ends) == 2 and all(map(math.isfinite, ends))
    low, high = (max(math.floor(ends[0]), 0), math.ceil(ends[1])) if is_range else (0, 0)
    set_params(**{_RANGE: f"{low}-{high}" if low < high else None})
    write_params()
