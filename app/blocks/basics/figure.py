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


def clickable_figure(figure: go.Figure, key: str) -> int | None:
    """A figure over steps; the step whose mark was clicked, None without a click."""
    figure.update_layout(uirevision=key)
    state = st.plotly_chart(
        figure, width="stretch", config=CONFIG, key=key, on_select="rerun", selection_mode=("points",)
    )
    clicked = [point.get("x") for point in state["selection"]["points"]]
    return next((int(step) for step in clicked if isinstance(step, int | float)), None)
