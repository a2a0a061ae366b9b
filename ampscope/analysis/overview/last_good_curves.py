"""The rows of the steps tell which went well, and how loss scale, learning rates, loss and gradient norm moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import narwhals as nw
import numpy as np

from ampscope.analysis.arrays import BoolArray, Columns, FloatArray, IntArray
from ampscope.analysis.overview.unusual_moves import gone, how_unusual
from ampscope.analysis.results import Move, MoveKind, SourceLine
from ampscope.analysis.scale.scaler_course import changes_since
from ampscope.analysis.tables.lazy_tables import collect
from ampscope.analysis.tables.step_history import History, in_order, recorded_rates, steps_of, with_group
from ampscope.trace.read.run import Run
from ampscope.trace.schema import EventKind, ScalerAction, Table

#: Attempts before an incident that are looked at one by one.
WINDOW = 96
#: A good step was calm if its loss, and its gradient norm, were at most this many times the largest
CALM = {"loss": 2.0, "grad_norm": 4.0}
#: of this many calm ones before it. Where so many in a row are above, that is how it is from then on.
BEFORE = 20
#: Calm steps, of fewer than which nothing is known of what is usual.
LEAST = 3
_COLUMNS = ("step", "segment", "loss", "grad_norm", "scale", "lr", "skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodSteps:
    """Holds the steps before a bad one, and which of them went well."""

    until: int  #: the step that went wrong
    last: int  #: the newest that went well
    calm: int  #: the newest that was calm
    window: Columns  #: the attempts up to ``until``, it included, in order
    good: BoolArray  #: which of them went well
    history: History
    good_history: BoolArray  #: which of all attempts before ``until`` went well

    def is_good(self, step: int) -> bool:
        """Whether a step went well, and is not after the newest that was calm."""
        place = int(np.searchsorted(self.history.step, step))
        inside = step <= self.calm and place < self.good_history.size
        return bool(inside and self.history.step[place] == step and self.good_history[place])

    def place(self, step: int) -> int:
        """Returns the place of a step in the window; the window's end for a step after it."""
        return int(np.searchsorted(self.window.ints("step"), step))


def good_steps(run: Run, rank: int, history: History, until: int) -> GoodSteps | None:
    """The steps before ``until``; None where none of them went well.

    Args:
        run: The run.
        rank: One of its ranks.
        history: The steps of an optimizer.
        until: One of them.
    """
    end = int(np.searchsorted(history.step, until))
    incidents = run.table(Table.INCIDENTS, rank=rank).filter(
        nw.col("optimizer") == history.optimizer, nw.col("step") < until
    )
    wrong = [row["step"] for row in collect(incidents.select("step").unique())]
    wrong += [row.step for row in run.rows(Table.EVENTS, rank=rank, kind=EventKind.SPIKE)]
    good = ~history.skipped[:end] & ~history.bad_loss[:end] & ~np.isin(history.step[:end], wrong)
    found = np.flatnonzero(good)
    if not found.size:
        return None
    first = int(history.step[max(0, int(found[-1]) - WINDOW)])
    rows = steps_of(run, rank, history.optimizer).filter(nw.col("step") >= first, nw.col("step") <= until)
    window = in_order(rows.select(*_COLUMNS))
    steps = window.ints("step")
    well = np.isin(steps, history.step[:end][good]) & ~window.bad("grad_norm")
    if not well.any():
        return None
    calm = _calm(window, well)
    return GoodSteps(
        until=until,
        last=int(steps[well][-1]),
        calm=int(steps[calm][-1]),
        window=window,
        good=well,
        history=history,
        good_history=good,
    )


def _calm(window: Columns, good: BoolArray) -> BoolArray:
    calm = good.copy()
    for name, limit in CALM.items():
        calm &= _below(window.floats(name), good, limit)
    return calm if calm.any() else good


def _below(values: FloatArray, good: BoolArray, limit: float) -> BoolArray:
    """Returns a mask of the good values that are not far above the largest of those before."""
    found = good.copy()
    before: list[float] = []
    above: list[float] = []
    for place in np.flatnonzero(good & (values > 0)).tolist():
        value = float(values[place])
        if len(before) >= LEAST and value > limit * max(before[-BEFORE:]):
            found[place] = False
            above.append(value)
            if len(above) >= BEFORE:
                before, above = above, []
        else:
            before.append(value)
            above = []
    return found


class GroupRate(NamedTuple):
    """A further group's learning rate."""

    name: str  #: the group's own, or its number
    told: str  #: ``parameter group head``, ``parameter group 1 (counted from 0)``
    window: FloatArray  #: in the attempts of `GoodSteps.window`; NaN where it was not recorded
    history: Callable[[], FloatArray]  #: likewise in those of `GoodSteps.history`


def group_rates(run: Run, rank: int, good: GoodSteps) -> Iterator[GroupRate]:
    """The further groups that had a rate of their own in a step of the window."""
    steps = good.window.ints("step")
    rates = _recorded(run, rank, good, int(steps[0]), int(steps[-1]))
    groups = dict.fromkeys(group for told in rates.values() for group in told)
    for group in [each for each in groups if each.partition(" ")[0] != "0"]:
        number, _, own = group.partition(" ")
        yield GroupRate(
            name=own or number,
            told=f"parameter group {own or f'{number} (counted from 0)'}",
            window=_filled(good.window.floats("lr"), steps, rates, group),
            history=partial(_history, run, rank, good, group),
        )


def _history(run: Run, rank: int, good: GoodSteps, group: str) -> FloatArray:
    """Only asked for where a rate has moved: of a long run that takes a while."""
    steps = good.history.step
    rates = _recorded(run, rank, good, int(steps[0]), good.until)
    return _filled(good.history.lr, steps, rates, group)


def _recorded(run: Run, rank: int, good: GoodSteps, first: int, last: int) -> dict[int, dict[str, object]]:
    """By step, the rates of all groups, where they were not the same."""
    return recorded_rates(run, rank, good.history.optimizer, nw.col("step") >= first, nw.col("step") <= last)


def _filled(first: FloatArray, steps: IntArray, rates: Mapping[int, Mapping[str, object]], group: str) -> FloatArray:
    return with_group(first, {place: rates[step] for place, step in enumerate(steps.tolist()) if step in rates}, group)


#: Bits by which a number has moved at least: a fifth for a learning rate, twofold for what each batch moves.
LEAST_BITS = {MoveKind.SCALE: 0.01, MoveKind.LEARNING_RATE: math.log2(1.2), MoveKind.LOSS: 1.0, MoveKind.GRAD_NORM: 1.0}
#: The score of a scale that a scaler lowers by itself: that is what comes of steps that were skipped.
AT_WORK = 1.0
#: Attempts that tell how a scale or a rate usually moves.
_MOST = 100_000
#: Stands for zero, which has no logarithm.
_TINY = 2.0**-160
_GIVEN = "good steps"
#: Who set a number with which a step began, in words, and the line.
_By = Callable[[int], tuple[str, SourceLine | None]]
#: What a number was and what it has become, at which step, and by how many bits.
_Between = tuple[float, float, int, float]
#: How the loop may have set a scale itself.
_BY_HAND = {ScalerAction.UPDATE: "set by the loop", ScalerAction.STATE_LOADED: "loaded with the scaler's state"}


def moved_curves(run: Run, rank: int, good: GoodSteps) -> Iterator[Move]:
    """The moves of these numbers up to the step that went wrong."""
    scale = _Setting("the loss scale", good.window.floats("scale"), lambda: good.history.scale)
    yield from _set(MoveKind.SCALE, good, scale, good.calm, lambda step: _by_hand(run, rank, good, step))
    # The calm step is the first that could be spoilt by the update before it, and its own update used its own rate.
    before = good.window.ints("step")[good.good & (good.window.ints("step") < good.calm)]
    since = int(before[-1]) if before.size else good.calm
    rate = _Setting("the learning rate", good.window.floats("lr"), lambda: good.history.lr)
    told = _between(good, rate.window, since)
    yield from _set(MoveKind.LEARNING_RATE, good, rate, since, lambda _: ("", None))
    for group in group_rates(run, rank, good):
        of_group = _Setting(f"the learning rate of {group.told}", group.window, group.history)
        if not _moved_alike(told, _between(good, group.window, since)):
            moves = _set(MoveKind.LEARNING_RATE, good, of_group, since, lambda _: ("", None))
            yield from (replace(move, name=group.name) for move in moves)
    for kind in (MoveKind.LOSS, MoveKind.GRAD_NORM):
        yield from _measured(kind, good)


class _Setting(NamedTuple):
    """Describes a quantity that the loop or a scaler sets."""

    name: str
    window: FloatArray  #: in the attempts of `GoodSteps.window`
    history: Callable[[], FloatArray]  #: in those of `GoodSteps.history`


def _set(kind: MoveKind, good: GoodSteps, setting: _Setting, since: int, by: _By) -> Iterator[Move]:
    """A move of a setting; its history tells how often it is set."""
    found = _between(good, setting.window, since)
    if found is None:
        return
    before, after, step, bits = found
    if abs(bits) < LEAST_BITS[kind]:
        return
    end = int(np.searchsorted(good.history.step, since, side="right"))
    begin, values = max(0, end - _MOST), setting.history()
    kept = good.good_history[begin:end] & np.isfinite(values[begin:end]) & (values[begin:end] >= 0)
    steps, heights = good.history.step[begin:end][kept], _heights(values[begin:end][kept])
    unusual = how_unusual(steps, heights, bits, good.until)
    how, source = by(step)
    at, usual = f" at step {step:,}{f' ({how})' if how else ''}", unusual.in_words(_GIVEN)
    if kind is MoveKind.SCALE and after < before and not how:
        unusual, usual = unusual._replace(score=AT_WORK), "as GradScaler lowers it after skipped steps"
    text = f"{gone(setting.name, before, after)}{at}, {usual}"
    yield Move(
        kind=kind,
        text=text,
        before=before,
        after=after,
        score=unusual.score,
        seen=unusual.seen,
        step=step,
        source=source,
    )


def _moved_alike(one: _Between | None, other: _Between | None) -> bool:
    """Whether two learning rates moved by the same factor at the same step, as one schedule moves them."""
    if one is None or other is None:
        return other is None
    return one[2] == other[2] and abs(one[3] - other[3]) < LEAST_BITS[MoveKind.LEARNING_RATE] / 2


def _between(good: GoodSteps, values: FloatArray, since: int) -> _Between | None:
    """Returns a number's value at a step and its newest, the step by which half of the move was made, and its bits."""
    steps = good.window.ints("step")
    place = good.place(since)
    after = np.flatnonzero(np.isfinite(values) & (values >= 0) & (np.arange(values.size) > place))
    if place >= values.size or not after.size or not math.isfinite(values[place]) or values[place] < 0:
        return None
    heights = _heights(values)
    bits = heights - heights[place]
    total = float(bits[after[-1]])
    first = next((each for each in after.tolist() if abs(bits[each]) >= abs(total) / 2), int(after[-1]))
    return float(values[place]), float(values[after[-1]]), int(steps[first]), total


def _measured(kind: MoveKind, good: GoodSteps) -> Iterator[Move]:
    """Yields the move of a result of the steps, the loss or the gradient norm, where it is a positive number."""
    found = _between(good, good.window.floats(str(kind)), good.calm)
    if found is None or found[0] <= 0 or found[1] <= 0 or abs(found[3]) < LEAST_BITS[kind]:
        return
    before, after, _, bits = found
    end = good.place(good.calm) + 1
    values = good.window.floats(str(kind))[:end]
    kept = good.good[:end] & np.isfinite(values) & (values > 0)
    steps: IntArray = good.window.ints("step")[:end][kept]
    unusual = how_unusual(steps, _heights(values[kept]), bits, good.until)
    newest = good.window.floats(str(kind))
    step = int(good.window.ints("step")[np.flatnonzero(np.isfinite(newest))[-1]])
    name = "the loss" if kind is MoveKind.LOSS else "the gradient norm"
    text = f"{gone(name, before, after)} at step {step:,}, {unusual.in_words(_GIVEN)}"
    yield Move(kind=kind, text=text, before=before, after=after, score=unusual.score, seen=unusual.seen, step=step)


def _heights(values: FloatArray) -> FloatArray:
    found: FloatArray = np.log2(np.maximum(np.where(np.isfinite(values), values, 0.0), _TINY))
    return found


def _by_hand(run: Run, rank: int, good: GoodSteps, step: int) -> tuple[str, SourceLine | None]:
    """How the loop set the scale with which a step began, and in which line; nothing where it did not."""
    for row in changes_since(run, good.history.optimizer, rank, step - 1):
        action = next((each for each in _BY_HAND if each == row.action), None)
        if action is not None and row.step <= step:
            where = f" at {row.file.rpartition('/')[2]}:{row.line}" if row.file else ""
            return f"{_BY_HAND[action]}{where}", SourceLine.of(row)
    return "", None
