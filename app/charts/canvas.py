"""What the figures over steps share: stacked panels, marks at an edge for values that cannot be drawn, lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from markup import as_label
from palette import ALARM, CURVE, HAIRLINE
from plotly.subplots import make_subplots

from ampscope.analysis.curve import Curve

#: Where in a panel, from 0 at the bottom to 1 at the top, marks for what cannot be drawn sit.
TOP, BOTTOM = 0.93, 0.05
#: Heights and margins in pixels.
PANEL_HEIGHT, LANE_HEIGHT = 140, 26
#: Runs up to this long get a label for every step.
_COUNTED = 12
_GAP, _HEAD, _FOOT, _LEFT, _RIGHT = 34, 28, 54, 92, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of marks on the time line; each mark spans from a first to a last step."""

    name: str
    symbol: str
    color: str
    spans: tuple[tuple[int, int], ...]
    texts: tuple[str, ...] = ()  #: escaped; one for each span, or none


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The y axis of a panel."""

    title: str  #: escaped
    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()


def stacked(panels: int, lanes: int, *, steps: int) -> go.Figure:
    """Panels with a common axis of so many ``steps`` above each other, and a strip of ``lanes`` at the foot."""
    heights = [PANEL_HEIGHT] * panels + ([LANE_HEIGHT * lanes + 10] if lanes else [])
    total = sum(heights) + _GAP * (len(heights) - 1)
    figure = make_subplots(
        rows=len(heights),
        cols=1,
        shared_xaxes=True,
        row_heights=heights,
        vertical_spacing=_GAP / total if len(heights) > 1 else 0,
        specs=[[{"secondary_y": True}] for _ in heights],
    )
    figure.update_layout(
        height=total + _HEAD + _FOOT,
        margin={"l": _LEFT, "r": _RIGHT, "t": _HEAD, "b": _FOOT},
        showlegend=False,
        hovermode="closest",
        dragmode="zoom",
    )
    figure.update_xaxes(domain=[0, 1], showgrid=False, zeroline=False, tickformat=",", automargin=False)
    figure.update_xaxes(title_text="optimizer step", row=len(heights), col=1)
    if steps <= _COUNTED:
        figure.update_xaxes(dtick=1)  # there is no half a step
    figure.update_yaxes(gridcolor=HAIRLINE, zeroline=False, automargin=False, nticks=5)
    figure.update_yaxes(range=[0, 1], visible=False, fixedrange=True, secondary_y=True)
    return figure


def entitle(figure: go.Figure, row: int, text: str, *, lift: int = 0) -> None:
    """The name of a panel, upright and ``lift`` pixels above its left corner; ``text`` is escaped."""
    place = {"xref": "x domain", "yref": "y domain", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"}
    figure.add_annotation(text=text, showarrow=False, align="left", yshift=lift, row=row, col=1, **place)


def draw_curve(
    figure: go.Figure, row: int, curve: Curve, *, axis: Axis, hover: Sequence[str], shape: str = "linear"
) -> None:
    """A curve in its panel; ``hover`` holds one escaped text for each point."""
    figure.add_trace(
        go.Scatter(
            x=curve.steps,
            y=curve.values,
            mode="lines" if len(curve.steps) > 1 else "markers",
            line={"color": CURVE, "width": 1.6, "shape": shape},
            marker={"color": CURVE, "size": 6},
            customdata=list(hover),
            hovertemplate="step %{x:,d}<br>%{customdata}<extra></extra>",
        ),
        row=row,
        col=1,
    )
    figure.update_yaxes(**_scaling(axis), row=row, col=1, secondary_y=False)
    entitle(figure, row, axis.title)


def draw_edge(figure: go.Figure, row: int, steps: Sequence[int], text: str, *, at: float = TOP) -> None:
    """Marks at a panel's edge for values that have no place on its axis."""
    if not steps:
        return
    figure.add_trace(
        go.Scatter(
            x=steps,
            y=[at] * len(steps),
            mode="markers",
            marker={"symbol": "triangle-up" if at > 0.5 else "triangle-down", "size": 9, "color": ALARM},
            hovertemplate=f"step %{{x:,d}}<br>{text}<extra></extra>",
        ),
        row=row,
        col=1,
        secondary_y=True,
    )


def draw_lanes(figure: go.Figure, row: int, lanes: Sequence[Lane]) -> None:
    """The strip at the foot: one named lane for each kind of mark."""
    for place, lane in enumerate(reversed(lanes)):
        _draw_lane(figure, row, place, lane)
    figure.update_yaxes(
        tickvals=list(range(len(lanes))),
        ticktext=[as_label(lane.name) for lane in reversed(lanes)],
        range=[-0.6, len(lanes) - 0.4],
        showgrid=False,
        fixedrange=True,
        row=row,
        col=1,
        secondary_y=False,
    )


def _draw_lane(figure: go.Figure, row: int, place: int, lane: Lane) -> None:
    ends = [x for first, last in lane.spans if last > first for x in (first, last, None)]
    line = {"color": lane.color, "width": 3}
    bars = go.Scatter(x=ends, y=[place] * len(ends), mode="lines", line=line, hoverinfo="skip")
    marks = go.Scatter(
        x=[first for first, _ in lane.spans],
        y=[place] * len(lane.spans),
        mode="markers",
        marker={"symbol": lane.symbol, "size": 10, "color": lane.color, "line": {"width": 1.5, "color": lane.color}},
        customdata=list(lane.texts or [as_label(lane.name)] * len(lane.spans)),
        hovertemplate="step %{x:,d}<br>%{customdata}<extra></extra>",
    )
    figure.add_traces([bars, marks], rows=row, cols=1)


def _scaling(axis: Axis) -> dict[str, object]:
    if axis.log:
        return {"type": "log", "range": [math.log10(axis.low), math.log10(axis.high)], **_ticks(axis)}
    return {"type": "linear", "range": [axis.low, axis.high], **_ticks(axis)}


def _ticks(axis: Axis) -> dict[str, list[object]]:
    return {"tickvals": list(axis.ticks), "ticktext": list(axis.labels)} if axis.ticks else {}
