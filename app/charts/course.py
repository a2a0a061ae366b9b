"""Draws a place over steps with Plotly: its course, the ends of its dtype, and a forecast as a cone."""

from __future__ import annotations

import plotly.graph_objects as go

from ampscope.report.figures.course import Cone, CourseFigure, End
from ampscope.report.figures.stack import AXIS_NAME, step_words
from ampscope.report.html.markup import as_label
from ampscope.report.palette import ALARM, ALARM_SHADE, CURVE, HAIRLINE, MARK

#: Pixels.
_HEIGHT, _LEFT, _RIGHT, _TOP, _FOOT = 320, 64, 16, 22, 48
#: Points of a course up to which each is a dot.
_SPARSE = 80
#: On an axis of whole numbers up to this long Plotly would put labels between them.
_SHORT_AXIS = 12


def course_chart(seen: CourseFigure) -> go.Figure:
    """The whole figure."""
    figure = _frame(seen)
    if seen.cone is not None:
        _draw_cone(figure, seen.cone)
    for end in seen.ends:
        _draw_end(figure, end)
    figure.add_trace(_course(seen))
    if seen.overflows:
        figure.add_trace(_overflows(seen))
    if seen.marked is not None:
        steps = _steps(seen)
        side = "left" if seen.marked < (min(steps) + max(steps)) / 2 else "right"
        place = {"x": seen.marked, "y": 1, "yref": "paper", "xanchor": side, "yanchor": "bottom"}
        figure.add_vline(x=seen.marked, line={"color": MARK, "width": 1})
        figure.add_annotation(text=step_words(seen.marked), showarrow=False, font={"size": 11}, **place)
    return figure


def _steps(seen: CourseFigure) -> list[int]:
    """Returns the steps that the figure spans."""
    steps = [*seen.course.steps, *seen.overflows, *((seen.cone.high,) if seen.cone is not None else ())]
    return steps or [seen.marked or 0]


def _frame(seen: CourseFigure) -> go.Figure:
    steps = _steps(seen)
    low, high = min(steps), max(steps)
    beside = 0.02 * (high - low) or 1.0
    figure = go.Figure()
    figure.update_layout(
        height=_HEIGHT,
        margin={"l": _LEFT, "r": _RIGHT, "t": _TOP, "b": _FOOT},
        showlegend=False,
        hovermode="closest",
        dragmode="zoom",
    )
    whole = {"dtick": 1} if high - low < _SHORT_AXIS else {}
    figure.update_xaxes(
        title_text=AXIS_NAME,
        range=[low - beside, high + beside],
        showgrid=False,
        zeroline=False,
        tickformat=",",
        **whole,
    )
    figure.update_yaxes(
        title_text=seen.axis_name,
        range=[seen.low, seen.high],
        tickvals=[power for power, _ in seen.ticks],
        ticktext=[words for _, words in seen.ticks],
        gridcolor=HAIRLINE,
        zeroline=False,
    )
    return figure


def _course(seen: CourseFigure) -> go.Scatter:
    course = seen.course
    return go.Scatter(
        x=course.steps,
        y=[round(power, 3) for power in course.values],
        mode="lines+markers" if len(course.steps) <= _SPARSE else "lines",
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
