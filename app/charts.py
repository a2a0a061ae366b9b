"""Plotly draws panels and lanes over steps, a place's course with its forecast, and the dtypes of traced steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ampscope.report.figures.axis import Axis
from ampscope.report.figures.course_figure import Cone, CourseFigure, End
from ampscope.report.figures.precision_bars import DtypeSteps
from ampscope.report.figures.stack import AXIS_NAME, PAGE_HEIGHTS, Edge, Lane, Panel, Piece, Stack, step_words
from ampscope.report.html.markup import as_label
from ampscope.report.palette import ALARM, ALARM_SHADE, CURVE, HAIRLINE, MARK, OTHER_CURVE

#: Where in a panel, from 0 at the bottom to 1 at the top, marks for what cannot be drawn sit.
TOP, BOTTOM = 0.93, 0.05
#: Pixels between the panels, and around them: left, right, above and below.
_GAP, _AROUND = 34, (92, 16, 28, 54)
#: Room for half a mark beside the first and the last step, as a share of them all.
_BESIDE = 0.015
#: On an axis of whole numbers up to this long Plotly would put labels between them.
_SHORT_AXIS = 12
#: Axes that end below the one or at the other have labels with an exponent.
_SMALL, _LARGE = 1e-4, 1e6
#: A piece of a curve may be one point, which is a dot; so many are no dots any more.
_SPARSE = 12


def stack_figure(stack: Stack) -> go.Figure:
    """The whole figure; a mark of a lane has the lane's name as the second of its ``customdata``."""
    figure = _frame(stack)
    for row, panel in enumerate(stack.panels, start=1):
        _draw_panel(figure, row, panel)
    if stack.lanes:
        _draw_lanes(figure, len(stack.panels) + 1, stack.lanes)
    for step in stack.lines:
        _draw_line(figure, step, {"color": HAIRLINE, "width": 1, "dash": "dot"})
    if stack.marked is not None:
        _draw_marked(figure, stack.marked)
    return figure


def _frame(stack: Stack) -> go.Figure:
    """Panels with a common axis above each other, and a strip of lanes at the foot."""
    heights = [PAGE_HEIGHTS.panel] * len(stack.panels)
    heights += [PAGE_HEIGHTS.lane * len(stack.lanes) + 10] if stack.lanes else []
    total = sum(heights) + _GAP * (len(heights) - 1)
    figure = make_subplots(
        rows=len(heights),
        cols=1,
        shared_xaxes=True,
        row_heights=heights,
        vertical_spacing=_GAP / total if len(heights) > 1 else 0,
        specs=[[{"secondary_y": True}] for _ in heights],
    )
    _lay_out(figure, total + sum(_AROUND[2:]), _AROUND)
    figure.update_xaxes(domain=[0, 1], automargin=False, **_step_scaling(stack.axis))
    figure.update_xaxes(title_text=AXIS_NAME, row=len(heights), col=1)
    figure.update_yaxes(automargin=False)
    figure.update_yaxes(range=[0, 1], visible=False, fixedrange=True, secondary_y=True)
    return figure


def _lay_out(figure: go.Figure, height: int, around: tuple[int, int, int, int], **more: object) -> None:
    """All figures have no legend, and of the grid the lines across alone."""
    margin, more = dict(zip("lrtb", around, strict=True)), {"dragmode": "zoom", **more}
    figure.update_layout(height=height, margin=margin, showlegend=False, hovermode="closest", **more)
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_yaxes(gridcolor=HAIRLINE, zeroline=False)


def _step_scaling(axis: Axis) -> dict[str, object]:
    """Plotly finds the labels, anew for every zoom."""
    beside = _BESIDE * (axis.high - axis.low) or 1.0
    whole = {"dtick": 1} if axis.whole and axis.high - axis.low < _SHORT_AXIS else {}
    return {"range": [axis.low - beside, axis.high + beside], "tickformat": ",", **whole}


def _scaling(axis: Axis) -> dict[str, object]:
    low, high = (math.log10(axis.low), math.log10(axis.high)) if axis.log else (axis.low, axis.high)
    scaling = {"type": "log" if axis.log else "linear", "range": [low, high]}
    if axis.is_round:  # Plotly finds as many, anew for every zoom
        return {**scaling, "nticks": len(axis.ticks) + 1, "tickformat": _format(axis)}
    return {**scaling, "tickvals": list(axis.ticks), "ticktext": list(axis.labels)}


def _labels(ticks: Sequence[tuple[float, str]]) -> dict[str, object]:
    return {"tickvals": [at for at, _ in ticks], "ticktext": [words for _, words in ticks]}


def _format(axis: Axis) -> str:
    """Returns the axis's number format: with an exponent where numbers are very small or very large, as elsewhere."""
    largest = max(abs(axis.low), abs(axis.high))
    return ",~g" if _SMALL <= largest < _LARGE else "~e"


def _draw_panel(figure: go.Figure, row: int, panel: Panel) -> None:
    """A curve on its axis, with marks at the edges for what has no place there."""
    figure.add_trace(_curve(panel, panel.pieces, {"color": CURVE, "width": 1.6}, panel.sides[0]), row, 1)
    if panel.other is not None:
        line = {"color": OTHER_CURVE, "width": 2, "dash": "5px,2px"}
        figure.add_trace(_curve(panel, panel.other_pieces, line, panel.sides[1]), row, 1)
    figure.update_yaxes(**_scaling(panel.axis), row=row, col=1, secondary_y=False)
    _draw_name(figure, row, panel)
    for edge, at in ((panel.above, TOP), (panel.below, BOTTOM)):
        if edge.steps:
            figure.add_trace(_edge(edge, at), row=row, col=1, secondary_y=True)
    if panel.target is not None:
        _draw_target(figure, row, panel.target, as_label(panel.target_words))


def _curve(panel: Panel, pieces: Sequence[Piece], line: dict[str, object], side: str) -> go.Scatter:
    points = [point for piece in pieces for point in (*piece, None)]
    steps, values = ([None if point is None else point[at] for point in points] for at in (0, 1))
    whose = f"{as_label(side)}: " if side else ""
    return go.Scatter(
        x=steps,
        y=values,
        mode="lines+markers" if any(len(piece) == 1 for piece in pieces) else "lines",
        line={**line, "shape": "hvh" if panel.stepped else "linear"},
        marker={"color": line["color"], "size": 6 if len(points) < _SPARSE else 2},
        customdata=["" if number is None else whose + as_label(panel.hover(number)) for number in values],
        hoverinfo="none",  # the crosshair says it
    )


def _draw_name(figure: go.Figure, row: int, panel: Panel) -> None:
    """The panel's name above its left corner, and beside it what its edges' marks mean."""
    keys = (f"   {_colored(f'{edge.symbol.glyph} {as_label(edge.key)}', edge)}" for edge in panel.edges)
    figure.add_annotation(
        text=as_label(panel.name) + "".join(keys),
        showarrow=False,
        align="left",
        row=row,
        col=1,
        xref="x domain",
        yref="y domain",
        x=0,
        y=1,
        xanchor="left",
        yanchor="bottom",
    )


def _colored(words: str, edge: Edge) -> str:
    return words if edge.is_calm else f"<span style='color:{ALARM}'>{words}</span>"


def _edge(edge: Edge, at: float) -> go.Scatter:
    colors = [MARK if step in edge.harmless else ALARM for step in edge.steps]
    return go.Scatter(
        x=edge.steps,
        y=[at] * len(edge.steps),
        mode="markers",
        marker={"symbol": edge.symbol.value, "size": 9, "color": colors},
        hovertemplate=f"step %{{x:,d}}<br>{as_label(edge.hover)}<extra></extra>",
    )


def _draw_target(figure: go.Figure, row: int, target: float, words: str) -> None:
    figure.add_hline(
        y=target,
        row=row,
        col=1,
        line={"dash": "dot", "width": 1, "color": MARK},
        annotation={"text": words, "xanchor": "right", "yanchor": "bottom", "showarrow": False},
        exclude_empty_subplots=False,
    )


def _draw_line(figure: go.Figure, step: int, line: dict[str, object]) -> None:
    """A vertical line through all panels."""
    figure.add_shape(type="line", xref="x", yref="paper", x0=step, x1=step, y0=0, y1=1, line=line, layer="below")


def _draw_marked(figure: go.Figure, step: int, side: str = "right") -> None:
    """A line through all panels, with its step at the top."""
    _draw_line(figure, step, {"color": MARK, "width": 1.5})
    _write_above(figure, step, step_words(step), side)


def _write_above(figure: go.Figure, at: int, words: str, side: str) -> None:
    place = {"x": at, "xref": "x", "y": 1, "yref": "paper", "xanchor": side, "yanchor": "bottom"}
    figure.add_annotation(text=words, showarrow=False, font={"size": 11}, **place)


def _draw_lanes(figure: go.Figure, row: int, lanes: Sequence[Lane]) -> None:
    """The strip at the foot: one named lane for each kind of mark, the first on top."""
    upwards = list(reversed(lanes))
    for place, lane in enumerate(upwards):
        _draw_lane(figure, row, place, lane)
    figure.update_yaxes(
        tickvals=list(range(len(lanes))),
        ticktext=[as_label(lane.name) for lane in upwards],
        range=[-0.6, len(lanes) - 0.4],
        showgrid=False,
        fixedrange=True,
        row=row,
        col=1,
        secondary_y=False,
    )


def _draw_lane(figure: go.Figure, row: int, place: int, lane: Lane) -> None:
    bars = [_draw_bars(lane, place, sparse=sparse) for sparse in (False, True)]
    symbol = {"symbol": lane.symbol.value, "size": 10, "color": lane.color, "line": {"width": 1.5, "color": lane.color}}
    marks = go.Scatter(
        x=[first for first, _ in lane.spans],
        y=[place] * len(lane.spans),
        mode="markers",
        marker=symbol,
        customdata=[("<br>".join(map(as_label, hover)), lane.name) for hover in lane.hovers],
        hovertemplate="step %{x:,d}<br>%{customdata[0]}<extra></extra>",
    )
    figure.add_traces([*bars, marks], rows=row, cols=1)


def _draw_bars(lane: Lane, place: int, *, sparse: bool) -> go.Scatter:
    """From the first to the last step of each span; dotted where not every step between is meant."""
    mine = [span for at, span in enumerate(lane.spans) if (at in lane.sparse) == sparse]
    ends = [x for first, last in mine if last > first for x in (first, last, None)]
    line = {"color": lane.color, "width": 2 if sparse else 3, "dash": "dot" if sparse else "solid"}
    return go.Scatter(x=ends, y=[place] * len(ends), mode="lines", line=line, hoverinfo="skip")


#: Pixels.
_COURSE_HEIGHT, _COURSE_AROUND = 320, (64, 16, 22, 48)
#: Points of a course up to which each is a dot.
_COURSE_SPARSE = 80


def course_chart(seen: CourseFigure) -> go.Figure:
    """The whole figure."""
    figure = _course_frame(seen)
    if seen.cone is not None:
        _draw_cone(figure, seen.cone)
    for end in seen.ends:
        _draw_end(figure, end)
    figure.add_trace(_course(seen))
    if seen.overflows:
        figure.add_trace(_overflows(seen))
    if seen.marked is not None:
        _draw_marked(figure, seen.marked, "left" if seen.axis.place(seen.marked) < 0.5 else "right")
    return figure


def _course_frame(seen: CourseFigure) -> go.Figure:
    figure = go.Figure()
    _lay_out(figure, _COURSE_HEIGHT, _COURSE_AROUND)
    figure.update_xaxes(title_text=AXIS_NAME, **_step_scaling(seen.axis))
    figure.update_yaxes(title_text=seen.axis_name, range=[seen.low, seen.high], **_labels(seen.ticks))
    return figure


def _course(seen: CourseFigure) -> go.Scatter:
    course = seen.course
    return go.Scatter(
        x=course.steps,
        y=[round(power, 3) for power in course.values],
        mode="lines+markers" if len(course.steps) <= _COURSE_SPARSE else "lines",
        line={"color": CURVE, "width": 1.8},
        marker={"color": CURVE, "size": 5},
        customdata=[as_label(seen.words(power)) for power in course.values],
        hoverinfo="none",  # the crosshair says it
    )


def _draw_end(figure: go.Figure, end: End) -> None:
    note = {"text": as_label(end.words, 80), "x": 0, "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    figure.add_hline(y=end.power, line={"dash": "dash", "width": 1.5, "color": ALARM}, annotation=note)


def _draw_cone(figure: go.Figure, cone: Cone) -> None:
    """A wedge from the newest point to the steps between which it gets there; the line is the most likely way."""
    outline = go.Scatter(
        x=[cone.start, cone.low, cone.high, cone.start],
        y=[cone.power, cone.end, cone.end, cone.power],
        mode="lines",
        fill="toself",
        fillcolor=ALARM_SHADE,
        line={"width": 0},
        hoverinfo="skip",
    )
    way = go.Scatter(
        x=[cone.start, cone.step],
        y=[cone.power, cone.end],
        mode="lines+markers",
        line={"color": ALARM, "width": 1.5, "dash": "dot"},
        marker={"color": ALARM, "size": [0, 8], "symbol": "diamond"},
        hovertemplate=f"{as_label(cone.words, 120)}<extra></extra>",
    )
    figure.add_traces([outline, way])


def _overflows(seen: CourseFigure) -> go.Scatter:
    return go.Scatter(
        x=seen.overflows,
        y=[seen.high - 0.04 * (seen.high - seen.low)] * len(seen.overflows),
        mode="markers",
        marker={"symbol": "triangle-up", "size": 10, "color": ALARM},
        hovertemplate="step %{x:,d}<br>overflowed<extra></extra>",
    )


#: Pixels.
_DTYPES_HEIGHT, _DTYPES_AROUND = 236, (64, 16, 30, 54)
#: What stands beside the columns.
_SHARES = ((0, "0 %"), (0.5, "50 %"), (1, "100 %"))
#: Where marks stand, above the columns.
_ABOVE = 1.06


def dtype_steps_figure(seen: DtypeSteps) -> go.Figure:
    """The figure; the ``customdata`` of a column is its step."""
    figure = go.Figure()
    places = list(range(len(seen.steps)))
    for layer in seen.layers:
        same = {"marker": {"opacity": 1.0}}  # a click dims nothing
        figure.add_bar(
            x=places,
            y=list(layer.shares),
            customdata=list(seen.steps),
            marker={"color": layer.color, "line": {"width": 0}},
            hovertext=[as_label(hover, 80) for hover in layer.hovers],
            hoverinfo="text",
            selected=same,
            unselected=same,
        )
    if seen.marks:
        _draw_marks(figure, seen)
    if seen.chosen is not None:
        _draw_chosen(figure, seen.chosen, seen.chosen_words)
    _lay_out(
        figure, _DTYPES_HEIGHT, _DTYPES_AROUND, barmode="stack", bargap=0, dragmode=False, clickmode="event+select"
    )
    figure.update_xaxes(
        title_text=seen.axis, range=[-0.5, len(seen.steps) - 0.5], fixedrange=True, **_labels(seen.ticks)
    )
    figure.update_yaxes(title_text=seen.unit, range=[0, 1.12], fixedrange=True, **_labels(_SHARES))
    return figure


def _draw_marks(figure: go.Figure, seen: DtypeSteps) -> None:
    columns = [mark.column for mark in seen.marks]
    figure.add_scatter(
        x=columns,
        y=[_ABOVE] * len(columns),
        mode="markers",
        marker={"symbol": "triangle-down", "size": 11, "color": MARK},
        customdata=[seen.steps[column] for column in columns],
        hovertext=[as_label(mark.hover, 200) for mark in seen.marks],
        hoverinfo="text",
    )


def _draw_chosen(figure: go.Figure, column: int, words: str) -> None:
    """A frame around the step that the page shows."""
    edges = {"x0": column - 0.5, "x1": column + 0.5, "y0": 0, "y1": 1}
    figure.add_shape(type="rect", **edges, line={"color": MARK, "width": 2}, layer="above")
    _write_above(figure, column, words, "auto")
