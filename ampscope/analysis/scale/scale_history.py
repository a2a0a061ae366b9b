"""The course of a loss scaler over a run: its curve, changes, calls and skipped steps, and that in a few sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import narwhals as nw
import numpy as np

from ampscope.analysis.arrays import Columns, Curve, FloatArray, IntArray, make_curve, thin_marks
from ampscope.analysis.results import ScaleHealth
from ampscope.analysis.scale.health import scale_health
from ampscope.analysis.scale.scaler_course import (
    CALIBRATION_STEPS,
    RepeatedCall,
    ScaleCourse,
    ScaleEvent,
    ScalerLog,
    ScalerSettings,
    scale_event,
    scaler_log,
    settings_of,
)
from ampscope.analysis.tables.lazy_tables import collect, first_rank
from ampscope.analysis.tables.step_history import in_order, log2_curve, measured, step_optimizers, steps_of
from ampscope.analysis.words import in_words, times
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ScalerAction, ScalerEventRow, Table

#: Events after which the scale has a new value.
VALUE_ACTIONS = frozenset(
    {ScalerAction.INIT, ScalerAction.GROWTH, ScalerAction.BACKOFF, ScalerAction.UPDATE, ScalerAction.STATE_LOADED}
)

#: Steps without a backoff after which the next one is another story: healthy steps lie between the two.
PAUSE = 20


class Direction(StrEnum):
    """Names the ways in which a scale may change."""

    UP = "up"
    DOWN = "down"
    SET = "set"  #: by hand
    LOADED = "loaded"  #: from a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleMove:
    """Neighbouring changes in one direction."""

    direction: Direction
    first_step: int
    last_step: int
    before: float
    after: float
    changes: int


def scale_after(rows: Iterable[ScalerEventRow], step: int) -> float | None:
    """Returns the scale after the newest event in ``step`` or later; None without one. The events must be in order."""
    later = [row.scale_after for row in rows if row.action in VALUE_ACTIONS and row.step >= step]
    return later[-1] if later else None


def moves_of_events(rows: Iterable[ScalerEventRow]) -> tuple[ScaleMove, ...]:
    """The moves told by scaler events, which must be in order."""
    return join(_change(row) for row in rows if row.action in VALUE_ACTIONS and _differs(row))


def moves_of_steps(steps: IntArray, scales: FloatArray) -> tuple[ScaleMove, ...]:
    """The moves between neighbouring steps, for a trace that holds no scaler events."""
    where = np.flatnonzero(np.diff(scales) != 0)
    pairs = ((int(steps[i]), float(scales[i]), float(scales[i + 1])) for i in where)
    return join(_single(_way(before, after), step, before, after) for step, before, after in pairs)


def join(changes: Iterable[ScaleMove]) -> tuple[ScaleMove, ...]:
    """Neighbouring changes in the same direction become one move; backoffs only while they follow closely."""
    groups: list[list[ScaleMove]] = []
    for change in changes:
        if groups and _goes_on(groups[-1][-1], change):
            groups[-1].append(change)
        else:
            groups.append([change])
    return tuple(_span(group) for group in groups)


def _goes_on(last: ScaleMove, change: ScaleMove) -> bool:
    close = change.first_step - last.last_step <= PAUSE
    return change.direction == last.direction and (close or change.direction != Direction.DOWN)


def _differs(row: ScalerEventRow) -> bool:
    return row.scale_before is not None and row.scale_after is not None and row.scale_before != row.scale_after


def _change(row: ScalerEventRow) -> ScaleMove:
    before, after = row.scale_before or 0.0, row.scale_after or 0.0
    deliberate = {str(ScalerAction.UPDATE): Direction.SET, str(ScalerAction.STATE_LOADED): Direction.LOADED}
    return _single(deliberate.get(row.action, _way(before, after)), row.step, before, after)


def _way(before: float, after: float) -> Direction:
    return Direction.UP if after > before else Direction.DOWN


def _single(direction: Direction, step: int, before: float, after: float) -> ScaleMove:
    return ScaleMove(direction=direction, first_step=step, last_step=step, before=before, after=after, changes=1)


def _span(group: list[ScaleMove]) -> ScaleMove:
    first, last = group[0], group[-1]
    return ScaleMove(
        direction=first.direction,
        first_step=first.first_step,
        last_step=last.last_step,
        before=first.before,
        after=last.after,
        changes=len(group),
    )


#: Attempts over which the recent share of skips is taken.
RECENT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleHistory(NotebookRepr):
    """The scaler as one optimizer saw it.

    It has many attributes because it holds the counts and the curves of one page together.
    """

    rank: int = 0
    optimizer: int = 0
    optimizers: tuple[int, ...] = ()
    scalers: int = 0  #: number of scalers in the run
    settings: ScalerSettings = field(default_factory=ScalerSettings)
    steps: int = 0
    skipped: int = 0
    recent_steps: int = 0  #: the last steps, `RECENT` at most
    recent_skipped: int = 0
    first: float | None = None  #: scale of the first step that has one
    current: float | None = None
    lowest: float | None = None
    log2_scale: Curve = field(default_factory=Curve)  #: a scale of 0 counts as not finite
    growth_tracker: Curve = field(default_factory=Curve)
    skips: tuple[int, ...] = ()  #: thinned; `skipped` is the true number
    moves: tuple[ScaleMove, ...] = ()
    events: tuple[ScaleEvent, ...] = ()
    calls: tuple[RepeatedCall, ...] = ()
    health: ScaleHealth | None = None  #: null where no step had a scale

    @property
    def is_scaled(self) -> bool:
        """Whether any step ran with a loss scale."""
        return self.first is not None

    @property
    def skipped_share(self) -> float | None:
        """Skipped attempts as a share of all attempts."""
        return self.skipped / self.steps if self.steps else None


def scale_history(run: Run, *, optimizer: int | None = None, rank: int | None = None) -> ScaleHistory:
    """The history seen by ``optimizer`` on ``rank`` (by default the run's first); an empty run gives an empty one."""
    rank = first_rank(run) if rank is None else rank
    optimizers = step_optimizers(run, rank)
    if not optimizers:
        return ScaleHistory()
    chosen = optimizers[0] if optimizer is None else optimizer
    steps = steps_of(run, rank, chosen).select("step", "loss", "scale", "growth_tracker", "skipped")
    history = _history(in_order(steps), scaler_log(run, chosen, rank))
    return replace(history, optimizer=chosen, optimizers=optimizers, rank=rank)


def _history(steps: Columns, log: ScalerLog) -> ScaleHistory:
    at, scales = measured(steps, "scale")
    settings = settings_of(log.changes)
    current = _current(log.changes, at, scales)
    skipped = steps.flags("skipped")
    return ScaleHistory(
        scalers=log.scalers,
        settings=settings,
        steps=len(steps),
        skipped=int(skipped.sum()),
        recent_steps=min(len(steps), RECENT),
        recent_skipped=int(skipped[-RECENT:].sum()),
        first=float(scales[0]) if len(scales) else None,
        current=current,
        lowest=min(float(scales.min()), current) if len(scales) and current is not None else None,
        log2_scale=log2_curve(steps),
        growth_tracker=make_curve(*measured(steps, "growth_tracker")),
        skips=thin_marks(steps.ints("step")[skipped]),
        moves=moves_of_events(log.changes) or moves_of_steps(at, scales),
        events=tuple(scale_event(row) for row in log.changes),
        calls=log.calls,
        health=scale_health(ScaleCourse.of(steps, settings)),
    )


def _current(changes: tuple[ScalerEventRow, ...], at: IntArray, scales: FloatArray) -> float | None:
    """The scale that the next step will use: the newest step's, unless an event changed it after that step."""
    changed = scale_after(changes, int(at[-1]) if len(at) else -1)
    return float(scales[-1]) if changed is None and len(scales) else changed


#: The newest skips that are told one by one, and parameters that are named of each.
LATEST, NAMED = 2000, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedStep:
    """A step that the scaler skipped."""

    step: int
    scale: float | None
    loss: float | None
    params: tuple[str, ...] = ()  #: the first of those whose gradients were not finite, at most `NAMED`
    tripped: int = 0  #: how many those were; 0 where it was not recorded
    all_params: int = 0  #: parameters of the run


def skipped_steps(run: Run, *, optimizer: int | None = None, rank: int | None = None) -> tuple[SkippedStep, ...]:
    """The newest skips of ``optimizer`` on ``rank`` (by default the run's first), the newest first."""
    rank = first_rank(run) if rank is None else rank
    chosen = next(iter(step_optimizers(run, rank)), 0) if optimizer is None else optimizer
    mine = nw.col("optimizer") == chosen
    skips = run.table(Table.STEPS, rank=rank).filter(mine & nw.col("skipped")).select("step", "scale", "loss")
    rows = collect(skips.sort("step", descending=True).head(LATEST))
    if not rows:
        return ()
    params = {row.param: row.name for row in run.rows(Table.PARAMS, rank=rank) if row.kind == "parameter"}
    tripped = {**_of_incidents(run, rank, chosen), **_of_gradients(run, rank, chosen, rows[-1]["step"], params)}
    return tuple(_skipped(row, tripped.get(row["step"], []), len(params)) for row in rows)


def _skipped(row: dict[str, Any], tripped: list[str], params: int) -> SkippedStep:
    return SkippedStep(**row, params=tuple(tripped[:NAMED]), tripped=len(tripped), all_params=params)


def _of_gradients(run: Run, rank: int, optimizer: int, first: int, params: dict[int, str]) -> dict[int, list[str]]:
    """By step, the parameters whose gradients were recorded as not finite."""
    mine = (nw.col("optimizer") == optimizer) & (nw.col("step") >= first) & nw.col("nonfinite")
    bad = run.table(Table.GRADS, rank=rank).filter(mine).select("step", "param").sort("step", "param")
    found: dict[int, list[str]] = defaultdict(list)
    for row in collect(bad):
        found[row["step"]].append(params.get(row["param"], ""))
    return found


def _of_incidents(run: Run, rank: int, optimizer: int) -> dict[int, list[str]]:
    """By step, the parameters that incidents name."""
    rows = run.rows(Table.INCIDENTS, rank=rank, optimizer=optimizer)
    return {row.step: list(row.bad_params) for row in rows}


#: The halvings that calibration may take: 65536 halves 16 times on its way to 1.
CALIBRATION_CHANGES = 16
#: Halvings in a row after calibration that are a fall rather than a probe.
FALL = 3


def scale_story(history: ScaleHistory) -> tuple[str, ...]:
    """The history as sentences, oldest first; none for a run without a scaler."""
    if history.first is None or history.current is None:
        return ()
    return tuple(_sentences(history, history.first, history.current))


def _sentences(history: ScaleHistory, first: float, current: float) -> Iterator[str]:
    if not history.moves:
        yield f"The scale stayed at {in_words(first)} throughout."
        return
    rest = list(history.moves)
    if _calibrates(rest[0]):
        move = rest.pop(0)
        yield f"It calibrated from {in_words(move.before)} to {in_words(move.after)} in {_steps(move.changes)}."
    else:
        yield f"It started at {in_words(rest[0].before)}."
    for stretch in _stretches(rest):
        yield _tell(stretch)
    yield f"It is now {in_words(current)}."


def _calibrates(move: ScaleMove) -> bool:
    early = move.first_step < CALIBRATION_STEPS and move.changes <= CALIBRATION_CHANGES
    return move.direction == Direction.DOWN and early


def _stretches(moves: Sequence[ScaleMove]) -> Iterator[list[ScaleMove]]:
    """Growths and the backoffs that answer them belong together; falls and deliberate changes stand alone."""
    probing: list[ScaleMove] = []
    for move in moves:
        if _stands_alone(move):
            if probing:
                yield probing
            yield [move]
            probing = []
        else:
            probing.append(move)
    if probing:
        yield probing


def _stands_alone(move: ScaleMove) -> bool:
    return move.direction in (Direction.SET, Direction.LOADED) or (
        move.direction == Direction.DOWN and move.changes >= FALL
    )


def _tell(stretch: list[ScaleMove]) -> str:
    first, last = stretch[0], stretch[-1]
    match first.direction:
        case Direction.SET:
            return f"At step {last.last_step:,} it was set to {in_words(last.after)} by hand."
        case Direction.LOADED:
            return f"At step {last.last_step:,} it was set to {in_words(last.after)} from a checkpoint."
        case Direction.DOWN if first.changes >= FALL:
            return _fall(first)
        case _:
            return _probing(stretch)


def _fall(move: ScaleMove) -> str:
    span = f"Between steps {move.first_step:,} and {move.last_step:,}"
    return f"{span} it fell from {in_words(move.before)} to {in_words(move.after)} in {_steps(move.changes)}."


def _probing(stretch: list[ScaleMove]) -> str:
    grew = sum(move.changes for move in stretch if move.direction == Direction.UP)
    fell = sum(move.changes for move in stretch if move.direction == Direction.DOWN)
    top = max(max(move.before, move.after) for move in stretch)
    low = min(min(move.before, move.after) for move in stretch)
    if not fell:
        return f"Then it grew {times(grew)}, to {in_words(stretch[-1].after)}."
    if not grew:
        return f"At step {stretch[0].first_step:,} it backed off {times(fell)}, to {in_words(stretch[-1].after)}."
    return f"Then it grew {times(grew)} and backed off {times(fell)}, between {in_words(low)} and {in_words(top)}."


def _steps(count: int) -> str:
    return "one skipped step" if count == 1 else f"{count:,} skipped steps"
