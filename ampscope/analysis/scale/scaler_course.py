"""The course of a loss scale: the events of its scaler, what its attempts count, which skips only calibrate it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import narwhals as nw
import numpy as np

from ampscope.analysis.arrays import BoolArray, Columns, FloatArray, IntArray
from ampscope.analysis.results import SourceLine
from ampscope.analysis.tables.lazy_tables import Lazy, collect
from ampscope.analysis.tables.step_history import History
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ScalerAction, ScalerEventRow, Table
from ampscope.trace.schema.tables import details
from ampscope.trace.vocabulary import Cause

#: Events that a loop makes at every step.
ROUTINE = (ScalerAction.UNSCALE, ScalerAction.SKIP)
_IS_ROUTINE = nw.col("action").is_in([str(action) for action in ROUTINE])


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerSettings:
    """The constructor's arguments, where the trace tells them."""

    init_scale: float | None = None
    growth_factor: float | None = None
    backoff_factor: float | None = None
    growth_interval: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleEvent:
    """One change of the scaler, and the user's line that made it."""

    step: int
    action: str  #: `ScalerAction`
    before: float | None
    after: float | None
    detail: str  #: arguments in words, ``growth_interval = 500``; may be empty
    source: SourceLine | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedCall:
    """Describes a call of the scaler that a loop repeats, told once for each line."""

    action: str  #: `ScalerAction`
    count: int
    first_step: int
    last_step: int
    source: SourceLine | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerLog:
    """The events of the scaler that serves one optimizer."""

    changes: tuple[ScalerEventRow, ...]
    calls: tuple[RepeatedCall, ...]
    scalers: int  #: number of scalers in the run


def scaler_log(run: Run, optimizer: int, rank: int) -> ScalerLog:
    """The events that concern ``optimizer``; where the trace does not tell whose scaler it is, those of all."""
    frame, scalers = _events(run, optimizer, rank)
    return ScalerLog(
        changes=_changes(frame.filter(~_IS_ROUTINE)), calls=_calls(frame.filter(_IS_ROUTINE)), scalers=scalers
    )


def changes_since(run: Run, optimizer: int, rank: int, step: int) -> tuple[ScalerEventRow, ...]:
    """The newest of a log's changes: those in ``step`` and later."""
    frame, _ = _events(run, optimizer, rank)
    return _changes(frame.filter(~_IS_ROUTINE, nw.col("step") >= step))


def scaler_settings(run: Run, optimizer: int, rank: int) -> ScalerSettings:
    """The arguments with which the scaler of ``optimizer`` was made, without the rest of its log."""
    made = run.rows(Table.SCALER_EVENTS, rank=rank, action=ScalerAction.INIT)
    if len({row.scaler for row in made}) > 1:
        frame, _ = _events(run, optimizer, rank)
        made = list(_changes(frame.filter(nw.col("action") == str(ScalerAction.INIT))))
    return settings_of(sorted(made, key=lambda row: (row.time, row.step)))


def settings_of(changes: Sequence[ScalerEventRow]) -> ScalerSettings:
    """The arguments of the first constructor call among ``changes``."""
    made = [arguments(row.detail) for row in changes if row.action == ScalerAction.INIT]
    known = made[0] if made else {}
    return ScalerSettings(**{name: _number(known.get(name)) for name in ScalerSettings.__dataclass_fields__})


def scale_event(row: ScalerEventRow) -> ScaleEvent:
    """``row`` with its arguments in words."""
    return ScaleEvent(
        step=row.step,
        action=row.action,
        before=row.scale_before,
        after=row.scale_after,
        detail=", ".join(f"{name} = {value}" for name, value in arguments(row.detail).items()),
        source=SourceLine.of(row),
    )


def arguments(detail: str) -> dict[str, object]:
    """The JSON object in ``detail``; anything else is no arguments."""
    return details(detail) if detail else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _events(run: Run, optimizer: int, rank: int) -> tuple[Lazy, int]:
    """The events that concern ``optimizer``, and the number of scalers in the run."""
    frame = run.table(Table.SCALER_EVENTS, rank=rank)
    owners = collect(frame.select("scaler", "optimizer").unique())
    mine = [row["scaler"] for row in owners if row["optimizer"] == optimizer]
    if mine:
        frame = frame.filter(nw.col("scaler").is_in(mine))
    own = nw.col("optimizer").is_null() | (nw.col("optimizer") == optimizer)
    return frame.filter(own), len({row["scaler"] for row in owners})


def _changes(frame: Lazy) -> tuple[ScalerEventRow, ...]:
    rows = collect(frame.select(*ScalerEventRow._fields).sort("time", "step"))
    return tuple(ScalerEventRow(**row) for row in rows)


def _calls(frame: Lazy) -> tuple[RepeatedCall, ...]:
    spans = (nw.len().alias("count"), nw.col("step").min().alias("first"), nw.col("step").max().alias("last"))
    grouped = frame.group_by("action", "file", "line", "function", "code").agg(*spans)
    return tuple(map(_call, collect(grouped.sort("first", "file", "line"))))


def _call(row: dict[str, Any]) -> RepeatedCall:
    return RepeatedCall(
        action=str(row["action"]),
        count=int(row["count"]),
        first_step=int(row["first"]),
        last_step=int(row["last"]),
        source=_source(str(row["file"]), int(row["line"]), str(row["function"]), str(row["code"])),
    )


def _source(file: str, line: int, function: str, code: str) -> SourceLine | None:
    return SourceLine(file=file, line=line, function=function, code=code) if file else None


#: A scale halved this often in a row without a single good step has gone from 2**16 below 2**-4: no calibration.
LONGEST_CALIBRATION = 20
#: A scale that never grew is still finding its place this many attempts into the run.
CALIBRATION_STEPS = 20
#: A growth that was too much shows within so many steps, a tenth of the usual interval; later, gradients have changed.
PROBE_STEPS = 200
#: Rows of skips, and the share of steps lost in them, from which on a scale that never held is not finding its place.
RESTLESS_ROWS, RESTLESS_SHARE = 5, 0.4
#: A loss scale below 1 shrinks the gradients it exists to enlarge.
LOWEST_USEFUL_SCALE = 1.0


@dataclass(frozen=True, slots=True)
class SkipRun:
    """Consecutive skipped steps of one optimizer."""

    position: int  #: how many attempts came before
    first: int
    last: int
    lowest_scale: float
    recovered: bool  #: a good step followed
    had_trained: bool  #: a good step came before
    had_grown: bool  #: the scale had been raised since the skip before, and not long ago
    settles: bool  #: the scale came to hold after it, or may still: without skips below 1, and without end

    @property
    def count(self) -> int:
        """How many steps were skipped."""
        return self.last - self.first + 1

    @property
    def is_single(self) -> bool:
        """Whether one step was skipped, and a good one followed."""
        return self.count == 1 and self.recovered

    @property
    def calibrates(self) -> bool:
        """Whether this looks like the scale finding its place rather than collapsing."""
        ends = self.recovered or self.count <= LONGEST_CALIBRATION
        return ends and self.settles and self.lowest_scale >= LOWEST_USEFUL_SCALE

    @property
    def benign_cause(self) -> Cause:
        """The cause to name where the run of skips is harmless."""
        if self.had_grown:
            return Cause.BENIGN_PERIODIC_GROWTH
        early = not self.had_trained or self.position < CALIBRATION_STEPS
        return Cause.BENIGN_INITIAL_CALIBRATION if early else Cause.BENIGN_SCALE_ADJUSTMENT


class Skips:
    """The runs of skipped steps among the attempts of one optimizer, looked at one by one: a long run has many."""

    def __init__(self, history: History) -> None:
        self._history = history
        padded = np.concatenate(([False], history.skipped, [False]))
        self._starts = np.flatnonzero(~padded[:-1] & padded[1:])
        self._ends = np.flatnonzero(padded[:-1] & ~padded[1:])  # one past the last
        self._at = np.flatnonzero(history.skipped)
        #: Good steps before, between and after skips, and which of these are many.
        gaps = np.diff(np.concatenate(([-1], self._at, [history.step.size]))) - 1
        self._long = np.flatnonzero(gaps >= CALIBRATION_STEPS)
        self._known: dict[tuple[int, int], bool] = {}

    def __len__(self) -> int:
        return int(self._starts.size)

    def of_step(self, step: int) -> SkipRun | None:
        """The run that a step is in; None where it was not skipped."""
        number = int(np.searchsorted(self._history.step[self._starts], step, side="right")) - 1
        run = self.run(number) if number >= 0 else None
        return run if run is not None and step <= run.last else None

    def run(self, number: int) -> SkipRun:
        """One of them, counted from 0."""
        history, start, end = self._history, int(self._starts[number]), int(self._ends[number])
        scales = history.scale[start:end]
        known = scales[~np.isnan(scales)]
        since_last_skip = int(self._ends[number - 1]) if number else 0
        good = history.scale[max(since_last_skip, start - PROBE_STEPS) : start + 1]
        return SkipRun(
            position=start,
            first=int(history.step[start]),
            last=int(history.step[end - 1]),
            lowest_scale=float(known.min()) if known.size else 1.0,
            recovered=end < history.step.size,
            had_trained=int(np.searchsorted(self._at, start)) < start,
            had_grown=bool((good[1:] > good[:-1]).any()),
            settles=self._settles(start, end),
        )

    def _settles(self, start: int, end: int) -> bool:
        """Whether the scale came to hold after a run of skips; what a run's end has cut short may still.

        Calibration is harmless because it ends. One that goes on to scales below 1, or in which a good part of the
        steps is lost again and again, does not. Steps whose loss itself was not finite say nothing of it.
        """
        here = int(np.searchsorted(self._at, start))  # which skip: the gap with this number is before it
        after = int(np.searchsorted(self._long, here + end - 1 - start, side="right"))
        before = int(np.searchsorted(self._long, here, side="right")) - 1
        since = int(self._at[self._long[before]]) if before >= 0 else 0
        ends = after < self._long.size
        held = int(self._at[self._long[after] - 1]) + 1 if ends else self._history.step.size
        if (since, held) not in self._known:  # runs with few good steps between them share it
            self._known[since, held] = self._holds(since, held, ends=ends)
        return self._known[since, held]

    def _holds(self, since: int, held: int, *, ends: bool) -> bool:
        lost = (self._history.skipped & ~self._history.bad_loss)[since:held]
        if (self._history.scale[since:held][lost] < LOWEST_USEFUL_SCALE).any():
            return False
        rows = int((np.diff(lost.astype(np.int8), prepend=0) > 0).sum())
        return bool(ends or rows < RESTLESS_ROWS or lost.mean() < RESTLESS_SHARE)


@dataclass(frozen=True)
class ScaleCourse:
    """The attempts that had a scale, and what can be counted of them."""

    step: IntArray
    scale: FloatArray
    skipped: BoolArray
    bad_loss: BoolArray
    settings: ScalerSettings = ScalerSettings()

    @staticmethod
    def of(steps: Columns, settings: ScalerSettings = ScalerSettings()) -> ScaleCourse:
        """The course of step attempts, by their ``step``, ``scale``, ``skipped`` and ``loss``, in order."""
        scaled = steps.where(~np.isnan(steps.floats("scale")))
        flags = scaled.flags("skipped"), scaled.bad("loss")
        return ScaleCourse(scaled.ints("step"), scaled.floats("scale"), *flags, settings)

    @cached_property
    def rows(self) -> tuple[IntArray, IntArray]:
        """First and one-past-last positions of the rows of skips."""
        padded = np.concatenate(([False], self.skipped, [False]))
        return np.flatnonzero(~padded[:-1] & padded[1:]), np.flatnonzero(padded[:-1] & ~padded[1:])

    @cached_property
    def settled(self) -> int:
        """Position at which calibration was over: the first growth or long stretch of good steps; the end without."""
        starts, ends = self.rows
        gaps = np.append(starts, self.skipped.size) - np.concatenate(([0], ends))
        long = np.flatnonzero(gaps >= CALIBRATION_STEPS)
        stretch = int(np.concatenate(([0], ends))[long[0]]) if long.size else self.skipped.size
        growths = np.flatnonzero(self.change > 0)
        return min(stretch, int(growths[0])) if growths.size else stretch

    @cached_property
    def change(self) -> FloatArray:
        """The scale's change after each attempt but the last; NaN where an infinite one stays."""
        with np.errstate(invalid="ignore"):
            return np.diff(self.scale)

    @cached_property
    def held(self) -> float | None:
        """The largest scale at which a stretch of steps worked."""
        values, counts = np.unique(self.scale[~self.skipped], return_counts=True)
        enough = values[counts >= min(CALIBRATION_STEPS, max(1, int((~self.skipped).sum()) // 2))]
        return float(enough[-1]) if enough.size else None

    @property
    def lost(self) -> int:
        """Skips after calibration."""
        return int(self.skipped[self.settled :].sum())

    def since(self, position: int) -> BoolArray:
        """Marks the attempts from ``position`` on."""
        marked: BoolArray = np.arange(self.skipped.size) >= position
        return marked

    @property
    def hopeless(self) -> BoolArray:
        """Whether each attempt was skipped because its loss was not finite: no scale would have saved it."""
        return self.skipped & self.bad_loss
