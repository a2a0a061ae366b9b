"""A run's time line before it is drawn: loss, gradient norm, loss scale and learning rate above what happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ampscope.analysis.numerics.curve import Curve
from ampscope.analysis.overview.overview import Moment, Overview
from ampscope.analysis.results import Finding, Incident
from ampscope.analysis.scale.scale_history import ScaleHistory
from ampscope.analysis.scale.what_if import WhatIf
from ampscope.analysis.words.wording import cause_in_words, steps_in_words
from ampscope.report.html.figures.panels import Panel, counter_panel, measure_panel, scale_panel
from ampscope.report.html.markup import short
from ampscope.report.html.palette import MARK, SEVERITIES
from ampscope.trace.schema import EventKind, ScalerAction
from ampscope.trace.vocabulary import Severity

#: Vertical lines for saves, loads and resumes are drawn up to this many; their lanes always are.
MAX_LINES = 40
NOTHING = Curve()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of marks on the time line; each mark spans from a first to a last step."""

    name: str
    symbol: str  #: one of Plotly's
    color: str
    spans: tuple[tuple[int, int], ...]
    texts: tuple[tuple[str, ...], ...] = ()  #: lines of plain text; for each span, or none


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Panels with a common axis of steps above each other, lanes at the foot, and vertical lines through all."""

    steps: int  #: how many steps there are
    panels: tuple[Panel, ...]
    lanes: tuple[Lane, ...]
    lines: tuple[int, ...]


def timeline_stack(seen: Overview, items: Sequence[Incident | Finding]) -> Stack:
    """A run's steps; panels without a measurement and lanes without a mark are left out."""
    lanes = [*item_lanes(items), *skip_lane(seen.skips), *moment_lanes(seen.moments)]
    return Stack(steps=seen.steps, panels=tuple(_panels(seen)), lanes=tuple(lanes), lines=moment_lines(seen.moments))


def scale_stack(history: ScaleHistory, moments: Sequence[Moment], lr: Curve = NOTHING) -> Stack:
    """A scaler's history: scale and growth tracker, and the learning rate where it is given and changes."""
    panels = [scale_panel(history.log2_scale)]
    if not history.growth_tracker.is_empty:
        target = history.settings.growth_interval
        panels.append(counter_panel(history.growth_tracker, "growth tracker", target=target))
    panels += _lr_panel(lr)
    lanes = (*skip_lane(history.skips), *moment_lanes(moments))
    return Stack(steps=history.steps, panels=tuple(panels), lanes=lanes, lines=moment_lines(moments))


def _panels(seen: Overview) -> Iterator[Panel]:
    if not seen.loss.is_empty:
        yield measure_panel(seen.loss, "loss", "the loss was NaN or infinite")
    if not seen.grad_norm.is_empty:
        yield measure_panel(seen.grad_norm, "gradient norm", "gradients were NaN or infinite", log=True)
    if not seen.log2_scale.is_empty:
        yield scale_panel(seen.log2_scale)
    yield from _lr_panel(seen.lr)


def what_if_stack(answer: WhatIf, history: ScaleHistory) -> Stack:
    """The scale as it was above the scale as it would have been, on one and the same axis."""
    was, would = history.log2_scale, answer.log2_scale
    axis = scale_panel(Curve(steps=(*was.steps, *would.steps), values=(*was.values, *would.values))).axis
    panels = (
        replace(scale_panel(was), name="loss scale, as it was", axis=axis),
        replace(scale_panel(would), name="loss scale, with these settings", axis=axis),
    )
    lanes = (*skip_lane(history.skips, "skipped"), *skip_lane(answer.skips, "would be"))
    return Stack(steps=history.steps, panels=panels, lanes=lanes, lines=())


def _lr_panel(lr: Curve) -> Iterator[Panel]:
    if len(set(lr.values)) > 1 or lr.nonfinite:  # one that never changes is no story
        yield measure_panel(lr, "learning rate", "the learning rate was NaN or infinite")


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
                texts=tuple((f"{cause_in_words(item.cause)}, {steps_in_words(item)}",) for item in mine),
            )


def skip_lane(skips: Sequence[int], name: str = "step skipped") -> Iterator[Lane]:
    """The lane of skipped steps, if there are any."""
    if skips:
        yield Lane(name=name, symbol="line-ns", color=MARK, spans=tuple((step, step) for step in skips))


def moment_lanes(moments: Sequence[Moment]) -> Iterator[Lane]:
    """One lane for each kind of moment that occurs."""
    for kind, name, symbol in _MOMENT_LANES:
        mine = [moment for moment in moments if moment.kind == kind]
        if mine:
            yield Lane(
                name=name,
                symbol=symbol,
                color=MARK,
                spans=tuple((moment.step, moment.step) for moment in mine),
                texts=tuple((name, short(moment.text, 48)) if moment.text else (name,) for moment in mine),
            )


def moment_lines(moments: Sequence[Moment]) -> tuple[int, ...]:
    """Where state was saved or loaded or the run resumed; none where there are too many to be drawn as lines."""
    steps = sorted({moment.step for moment in moments if moment.kind in _LINED})
    return tuple(steps) if len(steps) <= MAX_LINES else ()
