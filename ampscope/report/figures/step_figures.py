"""The figures over optimizer steps: a run's time line, a scaler's history, two runs over each other, all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ampscope.analysis.arrays import Curve, thinner
from ampscope.analysis.causes.catalogue import item_in_words
from ampscope.analysis.diagnosis.run_summary import SCALE_AT_WORK
from ampscope.analysis.overview.overview import GroupCurve, Milestone, Overview
from ampscope.analysis.overview.rank_lives import CellState, StepGrid
from ampscope.analysis.results import Finding, Incident
from ampscope.analysis.scale.scale_history import ScaleHistory
from ampscope.analysis.scale.what_if import WhatIf
from ampscope.analysis.words import spanned, when_in_words
from ampscope.report.figures.axis import round_ticks, scale_axis
from ampscope.report.figures.stack import (
    Edge,
    Lane,
    Panel,
    Stack,
    Symbol,
    at_every_step,
    counter_panel,
    measure_panel,
    scale_panel,
)
from ampscope.report.numbers import count
from ampscope.report.palette import ALARM, MARK, SEVERITIES
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
    moments: Sequence[Milestone] = (),
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
    """Returns the steps that were skipped while the loss scale found its place, and for nothing else."""
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
    if skips:
        yield Lane(
            name=name, symbol=Symbol.STROKE, color=MARK, spans=at_every_step(skips), hovers=((name,),) * len(skips)
        )


def _moment_lanes(moments: Sequence[Milestone]) -> Iterator[Lane]:
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


def _moment_lines(moments: Sequence[Milestone]) -> tuple[int, ...]:
    """Returns the steps where state was saved or loaded or the run resumed; none where too many for lines."""
    steps = sorted({moment.step for moment in moments if moment.kind in _LINED})
    return tuple(steps) if len(steps) <= _MOST_LINES else ()


#: What the two are called.
SIDES = ("A", "B")
#: Points of a curve, and marks of a lane; there are six of each.
_POINTS, _MARKS = 700, 350
_NO_EDGE = Edge(symbol=Symbol.UP)


def overlay_stack(one: Overview, other: Overview | None = None, *, lines: Sequence[int] = ()) -> Stack:
    """The curves of one run, and of another over them where there is one.

    Args:
        one: A.
        other: B.
        lines: Steps at which a line is drawn: those that are compared.
    """
    return Stack(
        label="Loss, gradient norm and loss scale of both by optimizer step.",
        panels=tuple(_panels_of_two(one, other)),
        lanes=(*_lanes(one, SIDES[0]), *(_lanes(other, SIDES[1]) if other is not None else ())),
        lines=tuple(lines),
    )


def _panels_of_two(one: Overview, other: Overview | None) -> Iterator[Panel]:
    def theirs(curve: str) -> Curve | None:
        found: Curve | None = None if other is None else getattr(other, curve)
        return found

    if _is_seen(one.loss, theirs("loss")):
        yield _measure(one.loss, theirs("loss"), "loss", log=False)
    if _is_seen(one.grad_norm, theirs("grad_norm")):
        norm = _measure(one.grad_norm, theirs("grad_norm"), "gradient norm", log=True)
        yield replace(norm, name="gradient norm (L2, without the loss scale)")
    if _is_seen(one.log2_scale, theirs("log2_scale")):
        mine, also = _drawn(one.log2_scale), _drawn(theirs("log2_scale"))
        panel = replace(scale_panel(mine), axis=scale_axis(_both(mine, also)), name="loss scale (powers of two)")
        yield _overlaid(replace(panel, below=_NO_EDGE), None if other is None else also)


def _is_seen(mine: Curve, theirs: Curve | None) -> bool:
    return bool(mine.steps) or (theirs is not None and bool(theirs.steps))


def _measure(mine: Curve, theirs: Curve | None, name: str, *, log: bool) -> Panel:
    """A value of both on one axis; what is not finite stands in the lanes."""
    mine, also = _drawn(mine), _drawn(theirs)
    whole = measure_panel(replace(_both(mine, also), nonfinite=()), name, "", log=log)
    if whole.axis.log:
        mine, also = _positive(mine), _positive(also)
    return _overlaid(replace(whole, curve=mine, above=_NO_EDGE, below=_NO_EDGE), None if theirs is None else also)


def _overlaid(panel: Panel, theirs: Curve | None) -> Panel:
    return panel if theirs is None else replace(panel, other=theirs, sides=SIDES)


def _drawn(curve: Curve | None) -> Curve:
    return _NO_CURVE if curve is None else thinner(curve, _POINTS)


def _both(mine: Curve, theirs: Curve) -> Curve:
    return Curve(steps=(*mine.steps, *theirs.steps), values=(*mine.values, *theirs.values))


def _positive(curve: Curve) -> Curve:
    """Keeps the points that have a place on a logarithmic axis; the curve is broken where a value has none."""
    kept = [(step, value) for step, value in zip(curve.steps, curve.values, strict=True) if value > 0]
    zeros = [step for step, value in zip(curve.steps, curve.values, strict=True) if value <= 0]
    return replace(
        curve,
        steps=tuple(step for step, _ in kept),
        values=tuple(value for _, value in kept),
        nonfinite=tuple(sorted({*curve.nonfinite, *zeros})),
    )


def _lanes(seen: Overview, side: str) -> Iterator[Lane]:
    """Yields the lanes of one of two runs: its skipped steps, and those where a value was not finite."""
    bad = sorted({*seen.loss.nonfinite, *seen.grad_norm.nonfinite})
    lanes = ((bad, "NaN or inf", Symbol.UP, ALARM), (list(seen.skips), "skipped", Symbol.STROKE, MARK))
    for steps, name, symbol, color in lanes:
        if steps:
            shown = steps[:: max(1, -(-len(steps) // _MARKS))]
            yield Lane(
                name=f"{side}: {name}",
                symbol=symbol,
                color=color,
                spans=at_every_step(shown),
                hovers=((f"{side}: {name}",),) * len(shown),
            )


#: Rows that are named; of more, every so many.
_NAMED = 12
#: About as many steps are named below it.
_TICKS = 5

#: What a colour stands for, by the name of its class, in the order of the key.
KEY: dict[CellState, tuple[str, str]] = {
    CellState.STEPPED: ("stepped", "steps"),
    CellState.SKIPPED: ("skipped", "a step skipped"),
    CellState.RECEIVED: ("received", "a bad value came from another rank"),
    CellState.ORIGIN: ("origin", "a bad value was born here"),
    CellState.AFTERMATH: ("aftermath", "weights bad since an earlier step"),
    CellState.APART: ("apart", "differs from its replicas"),
    CellState.NOTHING: ("nothing", "nothing recorded"),
}


@dataclass(frozen=True, slots=True)
class CellStretch:
    """Neighbouring cells of one row that are alike; places are shares of the width."""

    start: float
    width: float
    kind: str  #: as in `KEY`
    hover: str


@dataclass(frozen=True, slots=True)
class GridRow:
    """One rank, or a few that share a row."""

    name: str  #: empty where it would stand too close to the next
    stretches: tuple[CellStretch, ...]


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The figure of all ranks over steps, ready to be painted."""

    label: str
    rows: tuple[GridRow, ...]
    ticks: tuple[tuple[float, str], ...]  #: steps below it, by their place
    key: tuple[tuple[str, str], ...]  #: class and words of what occurs in it


def rank_grid(grid: StepGrid) -> RankGrid:
    """The picture of ``grid``; one without a step has no rows."""
    rows, columns = grid.cells.shape
    every = max(1, -(-rows // _NAMED))
    drawn = tuple(
        GridRow(_row_name(grid, row) if row % every == 0 else "", _stretches(grid, row, columns)) for row in range(rows)
    )
    occurring = {CellState(int(state)) for state in set(grid.cells.ravel().tolist())}
    return RankGrid(
        label="What happened on each rank, by optimizer step.",
        rows=drawn,
        ticks=_ticks(grid) if columns else (),
        key=tuple(KEY[state] for state in KEY if state in occurring),
    )


def _stretches(grid: StepGrid, row: int, columns: int) -> tuple[CellStretch, ...]:
    found = []
    for state, cells in groupby(range(columns), key=lambda column: int(grid.cells[row, column])):
        first, *rest = cells
        last = rest[-1] if rest else first
        steps = spanned("step", grid.steps_of(first)[0], grid.steps_of(last)[1])
        kind, words = KEY[CellState(state)]
        hover = f"{_row_name(grid, row)}, {steps}: {words}"
        found.append(CellStretch(first / columns, (last + 1 - first) / columns, kind, hover))
    return tuple(found)


def _row_name(grid: StepGrid, row: int) -> str:
    return spanned("rank", *grid.ranks_of(row))


def _ticks(grid: StepGrid) -> tuple[tuple[float, str], ...]:
    total = grid.last_step - grid.first_step
    steps = round_ticks(grid.first_step, grid.last_step, _TICKS, whole=True)
    return tuple(((step - grid.first_step) / max(total, 1), count(int(step))) for step in steps)
