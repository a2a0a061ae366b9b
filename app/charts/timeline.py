"""A run's time line: loss, gradient norm and loss scale above each other, what happened in lanes below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import plotly.graph_objects as go
from markup import as_label
from palette import HAIRLINE, MARK, SEVERITIES

from ampscope.analysis.curve import Curve
from ampscope.analysis.overview import Moment, Overview
from ampscope.analysis.results import Finding, Incident
from ampscope.analysis.wording import cause_in_words, steps_in_words
from ampscope.trace.schema import EventKind, ScalerAction
from ampscope.trace.vocabulary import Severity
from charts.canvas import Lane, draw_lanes, stacked
from charts.panels import draw_measure, draw_scale

#: Vertical lines for saves, loads and resumes are drawn up to this many; their lanes always are.
MAX_LINES = 40

Panel = Callable[[go.Figure, int], None]

_SEVERITY_LANES = (
    (Severity.ERROR, "problem", "x"),
    (Severity.WARNING, "warning", "diamond"),
    (Severity.INFO, "harmless", "circle-open"),
)
_MOMENT_LANES = (
    (ScalerAction.STATE_SAVED, "state saved", "triangle-down"),
    (ScalerAction.STATE_LOADED, "state loaded", "triangle-up"),
    (EventKind.RESUME, "resumed", "star"),
    (EventKind.NOTE, "note", "square-open"),
    (EventKind.WARNING, "AMPscope", "diamond-open"),
)
_LINED = (ScalerAction.STATE_SAVED, ScalerAction.STATE_LOADED, EventKind.RESUME)


def timeline(seen: Overview, items: Sequence[Incident | Finding]) -> go.Figure:
    """The figure of a run's steps; panels without a measurement and lanes without a mark are left out."""
    panels = [draw for curve, draw in _panels(seen) if not curve.is_empty]
    lanes = [*item_lanes(items), *skip_lane(seen.skips), *moment_lanes(seen.moments)]
    figure = stacked(len(panels), len(lanes), steps=seen.steps)
    for row, draw in enumerate(panels, start=1):
        draw(figure, row)
    if lanes:
        draw_lanes(figure, len(panels) + 1, lanes)
    draw_lines(figure, seen.moments)
    return figure


def _panels(seen: Overview) -> Iterator[tuple[Curve, Panel]]:
    def loss(figure: go.Figure, row: int) -> None:
        draw_measure(figure, row, seen.loss, "loss", "the loss was NaN or infinite")

    def norm(figure: go.Figure, row: int) -> None:
        draw_measure(figure, row, seen.grad_norm, "gradient norm", "gradients were NaN or infinite", log=True)

    def scale(figure: go.Figure, row: int) -> None:
        draw_scale(figure, row, seen.log2_scale)

    yield seen.loss, loss
    yield seen.grad_norm, norm
    yield seen.log2_scale, scale


def item_lanes(items: Sequence[Incident | Finding]) -> Iterator[Lane]:
    """One lane for each severity that occurs."""
    for severity, name, symbol in _SEVERITY_LANES:
        mine = [item for item in items if item.severity == severity]
        if mine:
            yield Lane(
                name=name,
                symbol=symbol,
                color=SEVERITIES[severity],
                spans=tuple((item.step, item.last_step) for item in mine),
                texts=tuple(f"{cause_in_words(item.cause)}, {steps_in_words(item)}" for item in mine),
            )


def skip_lane(skips: Sequence[int]) -> Iterator[Lane]:
    """The lane of skipped steps, if there are any."""
    if skips:
        spans = tuple((step, step) for step in skips)
        yield Lane(name="step skipped", symbol="line-ns", color=MARK, spans=spans)


def moment_lanes(moments: Sequence[Moment]) -> Iterator[Lane]:
    """One lane for each kind of moment that occurs."""
    for kind, name, symbol in _MOMENT_LANES:
        mine = [moment for moment in moments if moment.kind == kind]
        if mine:
            texts = tuple(f"{name}<br>{as_label(moment.text)}" if moment.text else name for moment in mine)
            yield Lane(
                name=name,
                symbol=symbol,
                color=MARK,
                spans=tuple((moment.step, moment.step) for moment in mine),
                texts=texts,
            )


def draw_lines(figure: go.Figure, moments: Sequence[Moment]) -> None:
    """Vertical lines through all panels where state was saved or loaded or the run resumed."""
    steps = sorted({moment.step for moment in moments if moment.kind in _LINED})
    for step in steps if len(steps) <= MAX_LINES else ():
        line = {"color": HAIRLINE, "width": 1, "dash": "dot"}
        figure.add_shape(type="line", xref="x", yref="paper", x0=step, x1=step, y0=0, y1=1, line=line, layer="below")
