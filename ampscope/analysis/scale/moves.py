"""The stretches in which a loss scale went one way: what a reader remembers of its history."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ampscope.analysis.numerics.arrays import FloatArray, IntArray
from ampscope.trace.schema import ScalerAction, ScalerEventRow

#: Events after which the scale has a new value.
VALUE_ACTIONS = frozenset(
    {ScalerAction.INIT, ScalerAction.GROWTH, ScalerAction.BACKOFF, ScalerAction.UPDATE, ScalerAction.STATE_LOADED}
)

#: Steps without a backoff after which the next one is another story: healthy steps lie between the two.
PAUSE = 20


class Direction(StrEnum):
    """Which way a scale went."""

    UP = "up"
    DOWN = "down"
    SET = "set"  #: by hand
    LOADED = "loaded"  #: from a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Neighbouring changes in one direction."""

    direction: Direction
    first_step: int
    last_step: int
    before: float
    after: float
    changes: int


def scale_after(rows: Iterable[ScalerEventRow], step: int) -> float | None:
    """What the newest event made of the scale in ``step`` or later; the events must be in order, None without one."""
    later = [row.scale_after for row in rows if row.action in VALUE_ACTIONS and row.step >= step]
    return later[-1] if later else None


def moves_of_events(rows: Iterable[ScalerEventRow]) -> tuple[Move, ...]:
    """The moves told by scaler events, which must be in order."""
    return join(_change(row) for row in rows if row.action in VALUE_ACTIONS and _differs(row))


def moves_of_steps(steps: IntArray, scales: FloatArray) -> tuple[Move, ...]:
    """The moves between neighbouring steps, for a trace that holds no scaler events."""
    where = np.flatnonzero(np.diff(scales) != 0)
    pairs = ((int(steps[i]), float(scales[i]), float(scales[i + 1])) for i in where)
    return join(_single(_way(before, after), step, before, after) for step, before, after in pairs)


def join(changes: Iterable[Move]) -> tuple[Move, ...]:
    """Neighbouring changes in the same direction become one move; backoffs only while they follow closely."""
    groups: list[list[Move]] = []
    for change in changes:
        if groups and _goes_on(groups[-1][-1], change):
            groups[-1].append(change)
        else:
            groups.append([change])
    return tuple(_span(group) for group in groups)


def _goes_on(last: Move, change: Move) -> bool:
    close = change.first_step - last.last_step <= PAUSE
    return change.direction == last.direction and (close or change.direction != Direction.DOWN)


def _differs(row: ScalerEventRow) -> bool:
    return row.scale_before is not None and row.scale_after is not None and row.scale_before != row.scale_after


def _change(row: ScalerEventRow) -> Move:
    before, after = row.scale_before or 0.0, row.scale_after or 0.0
    deliberate = {str(ScalerAction.UPDATE): Direction.SET, str(ScalerAction.STATE_LOADED): Direction.LOADED}
    return _single(deliberate.get(row.action, _way(before, after)), row.step, before, after)


def _way(before: float, after: float) -> Direction:
    return Direction.UP if after > before else Direction.DOWN


def _single(direction: Direction, step: int, before: float, after: float) -> Move:
    return Move(direction=direction, first_step=step, last_step=step, before=before, after=after, changes=1)


def _span(group: list[Move]) -> Move:
    first, last = group[0], group[-1]
    return Move(
        direction=first.direction,
        first_step=first.first_step,
        last_step=last.last_step,
        before=first.before,
        after=last.after,
        changes=len(group),
    )
