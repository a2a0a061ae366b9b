"""Draws what the ops of each traced step ran in as stacked columns; a click on a column selects its step."""

from __future__ import annotations

import plotly.graph_objects as go

from ampscope.report.figures.precision_bars import DtypeSteps
from ampscope.report.html.markup import as_label
from ampscope.report.palette import HAIRLINE, MARK

#: Pixels.
_HEIGHT, _LEFT, _RIGHT, _TOP, _FOOT = 236, 64, 16, 30, 54
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
    _lay_out(figure, seen)
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
    place = {"x": column, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False, "font": {"size": 11}}
    figure.add_annotation(text=words, **place)


def _lay_out(figure: go.Figure, seen: DtypeSteps) -> None:
    figure.update_layout(
        height=_HEIGHT,
        margin={"l": _LEFT, "r": _RIGHT, "t": _TOP, "b": _FOOT},
        barmode="stack",
        bargap=0,
        showlegend=False,
        hovermode="closest",
        dragmode=False,
        clickmode="event+select",
    )
    figure.update_xaxes(
        tickvals=[at for at, _ in seen.ticks],
        ticktext=[words for _, words in seen.ticks],
        range=[-0.5, len(seen.steps) - 0.5],
        title_text=seen.axis,
        showgrid=False,
        zeroline=False,
        fixedrange=True,
    )
    figure.update_yaxes(
        range=[0, 1.12],
        tickvals=[0, 0.5, 1],
        ticktext=["0 %", "50 %", "100 %"],
        title_text=seen.unit,
        gridcolor=HAIRLINE,
        zeroline=False,
        fixedrange=True,
    )
