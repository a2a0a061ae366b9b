"""Puts a figure on the page."""

from __future__ import annotations

import plotly.graph_objects as go
import streamlit as st

#: No tool bar over the picture; double-click still zooms out.
CONFIG = {"displayModeBar": False, "displaylogo": False, "scrollZoom": False, "showTips": False}


def show_figure(figure: go.Figure, key: str) -> None:
    """The figure in the theme of the reader, as wide as the page; a zoom outlives a redrawing."""
    figure.update_layout(uirevision=key)
    st.plotly_chart(figure, width="stretch", config=CONFIG, key=key)


def clickable_figure(figure: go.Figure, key: str) -> tuple[int, str] | None:
    """A figure over steps; the step of the mark that was clicked and the lane it is in, None without a click."""
    figure.update_layout(uirevision=key)
    state = st.plotly_chart(
        figure, width="stretch", config=CONFIG, key=key, on_select="rerun", selection_mode=("points",)
    )
    for point in state["selection"]["points"]:
        step, told = point.get("x"), point.get("customdata")
        if isinstance(step, int | float):
            return int(step), str(told[1]) if isinstance(told, list) else ""
    return None
