"""The figures over optimizer steps: a run's time line, a scaler's history, and what it would have been."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ampscope.analysis.causes.catalogue import item_in_words
from ampscope.analysis.diagnosis.run_summary import SCALE_AT_WORK
from ampscope.analysis.numerics.arrays import Curve
from ampscope.analysis.overview.overview import GroupCurve, Moment, Overview
from ampscope.analysis.results import Finding, Incident
from ampscope.analysis.scale.scale_history import ScaleHistory
from ampscope.analysis.scale.what_if import WhatIf
from ampscope.analysis.words import when_in_words
from ampscope.report.figures.axis import scale_axis
from ampscope.report.figures.panels import counter_panel, measure_panel, scale_panel
from ampscope.report.figures.stack import Lane, Panel, Stack, Symbol, at_every_step
from ampscope.report.palette import MARK, SEVERITIES
from ampscope.report.safe_text import short
from ampscope.trace.schema import EventKind, ScalerAction
from ampscope.trace.vocabulary import Severity

#: Vertical lines for saves, loads and resumes are drawn up to this many; their lanes always are.
_MOST_LINES = 40
#: Characters of a note or a file's name that a mark shows.
_SHORT = 48
_NO_CURVE = Curve()
#: The lane of skipped steps.
SKIPPED = "step skipped"

#: A lane for each severity.
SEVERITY_LANES = {
    Severity.ERROR: ("problem", Symbol.CROSS),
    Severity.WARNING: ("warning", Symbol.DIAMOND),
    Severity.INFO: ("harmless", Symbol.OPEN_CIRCLE),
}
_MOMENT_LANES = (
    (ScalerAction.STATE_SAVED, "state saved", Symbol.DOWN),
    (ScalerAction.STATE_LOADED, "state loaded", Symbol.UP),
    (EventKind.RESUME, "resumed", Symbol.STAR),
    (EventKind.CURE, "healed", Symbol.STAR),
    (EventKind.CURE_LIFTED, "cure lifted", Symbol.OPEN_CIRCLE),
    (EventKind.NOTE, "note", Symbol.OPEN_SQUARE),
    (EventKind.WARNING, "AMPscope", Symbol.OPEN_DIAMOND),
    (EventKind.UNSEEN, "not observed", Symbol.OPEN_DIAMOND),
)
_LINED = (ScalerAction.STATE_SAVED, ScalerAction.STATE_LOADED, EventKind.RESUME)


def timeline_stack(seen: Overview, items: Sequence[Incident | Finding]) -> Stack:
    """A run's steps; panels without a measurement and lanes without a mark are left out."""
    return Stack(
        label="Loss, gradient norm, loss scale and learning rate by optimizer step, and what happened when.",
        panels=tuple(_panels(seen, _calibrating(seen.grad_norm.nonfinite, items))),
        lanes=(*_item_lanes(items), *_skip_lane(seen.skips), *_moment_lanes(seen.moments)),
        lines=_moment_lines(seen.moments),
    )


def scale_stack(
    history: ScaleHistory,
    moments: Sequence[Moment] = (),
    lr: Curve = _NO_CURVE,
    *,
    groups: Sequence[GroupCurve] = (),
    marked: int | None = None,
) -> Stack:
    """A scaler's history: scale and growth tracker, and learning rates where they are given and change.

    Args:
        history: What the scaler did.
        moments: When its state was saved or loaded, and the run resumed.
        lr: The learning rate.
        groups: Those of further parameter groups that move otherwise.
        marked: A step that the reader asked for.
    """
    panels = [scale_panel(history.log2_scale)]
    if not history.growth_tracker.is_empty:
        target = history.settings.growth_interval
        panels.append(counter_panel(history.growth_tracker, "growth tracker", target=target))
    return Stack(
        label="The loss scale and its growth tracker by optimizer step.",
        panels=(*panels, *_lr_panels(lr, groups)),
        lanes=(*_skip_lane(history.skips), *_moment_lanes(moments)),
        lines=_moment_lines(moments),
        marked=marked,
    )


def clipped_stack(seen: Overview) -> Stack:
    """The gradient norm and the loss scale, by which it was too small."""
    measured = measure_panel(seen.grad_norm, "gradient norm", "gradients were NaN or infinite", log=True)
    return Stack(
        label="Gradient norm and loss scale by optimizer step.", panels=(measured, scale_panel(seen.log2_scale))
    )


def what_if_stack(answer: WhatIf, history: ScaleHistory) -> Stack:
    """The scale as it was and as it would have been, over each other."""
    was, would = history.log2_scale, answer.log2_scale
    axis = scale_axis(Curve(steps=(*was.steps, *would.steps), values=(*was.values, *would.values)))
    return Stack(
        label="The loss scale by optimizer step, as it was and as it would have been.",
        panels=(
            replace(
                scale_panel(was),
                name="loss scale; dashed: with these settings",
                axis=axis,
                other=would,
                sides=("as it was", "with these settings"),
            ),
        ),
        lanes=(*_skip_lane(history.skips, "skipped"), *_skip_lane(answer.skips, "would be")),
    )


def _calibrating(steps: Sequence[int], items: Sequence[Incident | Finding]) -> frozenset[int]:
    """Those of the steps that were skipped while the loss scale found its place, and for nothing else."""
    incidents = [item for item in items if isinstance(item, Incident)]
    calm = [item for item in incidents if item.cause in SCALE_AT_WORK]
    worse = [item for item in incidents if item.severity is not Severity.INFO]

    def among(step: int, some: Sequence[Incident]) -> bool:
        return any(item.step <= step <= item.last_step for item in some)

    return frozenset(step for step in steps if among(step, calm) and not among(step, worse))


def _panels(seen: Overview, calibrating: frozenset[int]) -> Iterator[Panel]:
    if not seen.loss.is_empty:
        yield measure_panel(seen.loss, "loss", "the loss was NaN or infinite")
    if not seen.grad_norm.is_empty:
        norm = measure_panel(seen.grad_norm, "gradient norm", "gradients were NaN or infinite", log=True)
        yield replace(norm, above=replace(norm.above, harmless=calibrating))
    if not seen.log2_scale.is_empty:
        yield scale_panel(seen.log2_scale)
    yield from _lr_panels(seen.lr, seen.group_lrs)


def _lr_panels(first: Curve, groups: Sequence[GroupCurve]) -> Iterator[Panel]:
    yield from _lr_panel(first)
    for each in groups:
        yield from _lr_panel(each.lr, f"learning rate of group {short(each.group, _SHORT)}")


def _lr_panel(lr: Curve, name: str = "learning rate") -> Iterator[Panel]:
    if len(set(lr.values)) > 1 or lr.nonfinite:  # one that never changes tells nothing
        yield measure_panel(lr, name, f"the {name} was NaN or infinite")


def _item_lanes(items: Sequence[Incident | Finding]) -> Iterator[Lane]:
    """One lane for each severity that occurs; each mark names its cause."""
    for severity, (name, symbol) in SEVERITY_LANES.items():
        mine = [item for item in items if item.severity == severity]
        if mine:
            yield Lane(
                name=name,
                symbol=symbol,
                color=SEVERITIES[severity],
                spans=tuple((item.step, item.last_step) for item in mine),
                hovers=tuple((f"{item_in_words(item)}, {when_in_words(item)}",) for item in mine),
                sparse=frozenset(at for at, item in enumerate(mine) if item.count <= item.last_step - item.step),
            )


def _skip_lane(skips: Sequence[int], name: str = SKIPPED) -> Iterator[Lane]:
    """The lane of skipped steps, if there are any."""
    if skips:
        yield Lane(
            name=name, symbol=Symbol.STROKE, color=MARK, spans=at_every_step(skips), hovers=((name,),) * len(skips)
        )


def _moment_lanes(moments: Sequence[Moment]) -> Iterator[Lane]:
    """One lane for each kind of moment that occurs."""
    for kind, name, symbol in _MOMENT_LANES:
        mine = [moment for moment in moments if moment.kind == kind]
        if mine:
            yield Lane(
                name=name,
                symbol=symbol,
                color=MARK,
                spans=at_every_step([moment.step for moment in mine]),
                hovers=tuple((name, short(moment.text, _SHORT)) if moment.text else (name,) for moment in mine),
            )


def _moment_lines(moments: Sequence[Moment]) -> tuple[int, ...]:
    """Where state was saved or loaded or the run resumed; none where there are too many to be drawn as lines."""
    steps = sorted({moment.step for moment in moments if moment.kind in _LINED})
    return tuple(steps) if len(steps) <= _MOST_LINES else ()
