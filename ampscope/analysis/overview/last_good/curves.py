"""What the rows of the steps tell: how loss scale, learning rate, loss and gradient norm moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from ampscope.analysis.numerics.arrays import FloatArray, IntArray
from ampscope.analysis.overview.last_good.good_steps import GoodSteps
from ampscope.analysis.overview.last_good.unusual import how_unusual
from ampscope.analysis.overview.last_good.words import gone
from ampscope.analysis.results import Move, MoveKind, SourceLine
from ampscope.analysis.scale.scaler_log import changes_since
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ScalerAction

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
#: How the loop may have set a scale itself.
_BY_HAND = {ScalerAction.UPDATE: "set by the loop", ScalerAction.STATE_LOADED: "loaded with the scaler's state"}


def moved_curves(run: Run, rank: int, good: GoodSteps) -> Iterator[Move]:
    """The moves of these numbers up to the step that went wrong.

    Args:
        run: The run.
        rank: One of its ranks.
        good: The steps before.
    """
    yield from _setting(
        MoveKind.SCALE, good, good.history.scale, good.calm, lambda step: _by_hand(run, rank, good, step)
    )
    # The calm step is the first that could be spoilt by the update before it, and its own update used its own rate.
    before = good.window.ints("step")[good.good & (good.window.ints("step") < good.calm)]
    since = int(before[-1]) if before.size else good.calm
    yield from _setting(MoveKind.LEARNING_RATE, good, good.history.lr, since, lambda _: ("", None))
    for kind in (MoveKind.LOSS, MoveKind.GRAD_NORM):
        yield from _measured(kind, good)


def _setting(kind: MoveKind, good: GoodSteps, values: FloatArray, since: int, by: _By) -> Iterator[Move]:
    """What a loop sets, or a scaler: its history tells how often it is set."""
    found = _between(good, str(kind), since)
    if found is None:
        return
    before, after, step, bits = found
    if abs(bits) < LEAST_BITS[kind]:
        return
    end = int(np.searchsorted(good.history.step, since, side="right"))
    begin = max(0, end - _MOST)
    kept = good.good_history[begin:end] & np.isfinite(values[begin:end]) & (values[begin:end] >= 0)
    steps, heights = good.history.step[begin:end][kept], _heights(values[begin:end][kept])
    unusual = how_unusual(steps, heights, bits, good.until)
    how, source = by(step)
    name = "the loss scale" if kind is MoveKind.SCALE else "the learning rate"
    at, usual = f" at step {step:,}{f' ({how})' if how else ''}", unusual.in_words(_GIVEN)
    if kind is MoveKind.SCALE and after < before and not how:
        unusual, usual = unusual._replace(score=AT_WORK), "as GradScaler lowers it after skipped steps"
    text = f"{gone(name, before, after)}{at}, {usual}"
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


def _between(good: GoodSteps, column: str, since: int) -> tuple[float, float, int, float] | None:
    """What a number was and what it has become, at which step it left what it was, and by how many bits."""
    values, steps = good.window.floats(column), good.window.ints("step")
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
    """What came of the steps: a loss, a gradient norm, where it is a positive number."""
    found = _between(good, str(kind), good.calm)
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
            line = SourceLine(file=row.file, line=row.line, function=row.function, code=row.code) if row.file else None
            where = f" at {row.file.rpartition('/')[2]}:{row.line}" if row.file else ""
            return f"{_BY_HAND[action]}{where}", line
    return "", None
