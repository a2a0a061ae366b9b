"""Draws what goes over steps: stacked panels, marks at an edge for values that cannot be drawn, lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ampscope.report.html.figures.panels import Axis, Edge, Panel
from ampscope.report.html.figures.timeline import Lane, Stack
from ampscope.report.html.markup import as_label
from ampscope.report.html.palette import ALARM, CURVE, HAIRLINE, MARK

#: Where in a panel, from 0 at the bottom to 1 at the top, marks for what cannot be drawn sit.
TOP, BOTTOM = 0.93, 0.05
#: Heights and margins in pixels.
PANEL_HEIGHT, LANE_HEIGHT = 140, 26
#: Runs up to this long get a label for every step.
_COUNTED = 12
#: A piece of a curve may be one point, which is a dot; so many are no dots any more.
_SPARSE = 12
_GAP, _HEAD, _FOOT, _LEFT, _RIGHT = 34, 28, 54, 92, 16


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
    figure.update_yaxes(gridcolor=HAIRLINE, zeroline=False, automargin=False, nticks=5, exponentformat="power")
    figure.update_yaxes(range=[0, 1], visible=False, fixedrange=True, secondary_y=True)
    return figure


def entitle(figure: go.Figure, row: int, text: str, *, lift: int = 0) -> None:
    """The name of a panel, upright and ``lift`` pixels above its left corner; ``text`` is escaped."""
    place = {"xref": "x domain", "yref": "y domain", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"}
    figure.add_annotation(text=text, showarrow=False, align="left", yshift=lift, row=row, col=1, **place)


def draw_stack(stack: Stack) -> go.Figure:
    """The whole figure."""
    figure = stacked(len(stack.panels), len(stack.lanes), steps=stack.steps)
    for row, panel in enumerate(stack.panels, start=1):
        draw_panel(figure, row, panel)
    if stack.lanes:
        draw_lanes(figure, len(stack.panels) + 1, stack.lanes)
    draw_lines(figure, stack.lines)
    return figure


def draw_panel(figure: go.Figure, row: int, panel: Panel) -> None:
    """A curve on its axis, with marks at the edges for what has no place there."""
    figure.add_trace(_line(panel), row, 1)
    figure.update_yaxes(**_scaling(panel.axis), row=row, col=1, secondary_y=False)
    entitle(figure, row, as_label(panel.name) + _key("&#9650;", panel.above) + _key("&#9660;", panel.below))
    _draw_edge(figure, row, panel.above, at=TOP)
    _draw_edge(figure, row, panel.below, at=BOTTOM)
    if panel.target is not None:
        _draw_target(figure, row, panel.target, as_label(panel.target_words))


def _line(panel: Panel) -> go.Scatter:
    pieces = panel.pieces
    points = [point for piece in pieces for point in (*piece, None)]
    steps, values = ([None if point is None else point[at] for point in points] for at in (0, 1))
    return go.Scatter(
        x=steps,
        y=values,
        mode="lines+markers" if any(len(piece) == 1 for piece in pieces) else "lines",
        line={"color": CURVE, "width": 1.6, "shape": "hvh" if panel.stepped else "linear"},
        marker={"color": CURVE, "size": 6 if len(points) < _SPARSE else 2},
        customdata=["" if number is None else as_label(panel.tell(number)) for number in values],
        hovertemplate="step %{x:,d}<br>%{customdata}<extra></extra>",
    )


def _key(symbol: str, edge: Edge) -> str:
    """What a panel's edge marks mean, said beside its name where there are any."""
    return f"   <span style='color:{ALARM}'>{symbol} {as_label(edge.key)}</span>" if edge.steps else ""


def _draw_edge(figure: go.Figure, row: int, edge: Edge, *, at: float) -> None:
    if not edge.steps:
        return
    marks = go.Scatter(
        x=edge.steps,
        y=[at] * len(edge.steps),
        mode="markers",
        marker={"symbol": "triangle-up" if at > 0.5 else "triangle-down", "size": 9, "color": ALARM},
        hovertemplate=f"step %{{x:,d}}<br>{as_label(edge.told)}<extra></extra>",
    )
    figure.add_trace(marks, row=row, col=1, secondary_y=True)


def _draw_target(figure: go.Figure, row: int, target: float, words: str) -> None:
    figure.add_hline(
        y=target,
        row=row,
        col=1,
        line={"dash": "dot", "width": 1, "color": MARK},
        annotation={"text": words, "xanchor": "right", "yanchor": "bottom", "showarrow": False},
        exclude_empty_subplots=False,
    )


def draw_lines(figure: go.Figure, steps: Sequence[int]) -> None:
    """Vertical lines through all panels."""
    for step in steps:
        line = {"color": HAIRLINE, "width": 1, "dash": "dot"}
        figure.add_shape(type="line", xref="x", yref="paper", x0=step, x1=step, y0=0, y1=1, line=line, layer="below")


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
        customdata=["<br>".join(map(as_label, lines)) for lines in lane.texts or [(lane.name,)] * len(lane.spans)],
        hovertemplate="step %{x:,d}<br>%{customdata}<extra></extra>",
    )
    figure.add_traces([bars, marks], rows=row, cols=1)


def _scaling(axis: Axis) -> dict[str, object]:
    if axis.log:
        return {"type": "log", "range": [math.log10(axis.low), math.log10(axis.high)], **_ticks(axis)}
    return {"type": "linear", "range": [axis.low, axis.high], **_ticks(axis)}


def _ticks(axis: Axis) -> dict[str, list[object]]:
    return {"tickvals": list(axis.ticks), "ticktext": list(axis.labels)} if axis.ticks else {}
