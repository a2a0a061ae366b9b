"""The scalers of a resumed run: whether they go on with a state that the run had, and with which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ampscope.analysis.tables.lazy_tables import collect_expressions, rank_table
from ampscope.trace.json_columns import details
from ampscope.trace.read.run import Run
from ampscope.trace.schema import FindingRow, ScalerAction, ScalerEventRow, Table
from ampscope.trace.vocabulary import Cause

#: What changes no scale, and of which a long run has millions.
_ROUTINE = ", ".join(f"'{action}'" for action in (ScalerAction.UNSCALE, ScalerAction.SKIP))
#: The order of what happens to a scaler at one moment of one step.
_ORDER = [str(action) for action in ScalerAction]
#: Events that may share the newest moment and step of a scaler.
_MOST_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedScaler:
    """A scaler of a resumed segment."""

    start: ScalerEventRow  #: how it began
    last: float | None  #: the newest other scale that the run had found; None where it was given a state while watched
    saved_at: tuple[int, ...]  #: steps before which the run had saved the state that it begins with

    @property
    def goes_on(self) -> bool:
        """Whether it has a state that the run had: the newest, or that of a checkpoint."""
        return self.last is None or bool(self.saved_at)


def resumed_scalers(run: Run, rank: int) -> Iterator[ResumedScaler]:
    """Every scaler of a resumed run that takes the place of one before it."""
    loads = run.rows(Table.SCALER_EVENTS, rank=rank, action=ScalerAction.STATE_LOADED)
    loaded = {(event.segment, event.scaler): event for event in loads}
    optimizers = run.rows(Table.FINDINGS, rank=rank, cause=Cause.MISUSE_SCALER_STATE_NOT_RESTORED)
    for start, before in _resumed(run.rows(Table.SCALER_EVENTS, rank=rank, action=ScalerAction.INIT)):
        load = loaded.get((start.segment, start.scaler))
        last = _last_scale(run, rank, start.segment - 1, before[-1]) if load is None else None
        made = max((steps_made(row) for row in optimizers if row.segment == start.segment), default=0)
        saved = dict.fromkeys(step for step in _saved_at(run, rank, load or start, before) if step >= max(made, 1))
        other = last if start.scale_after not in (None, last) else None
        yield ResumedScaler(start=start, last=other, saved_at=tuple(saved))


def steps_made(row: FindingRow) -> int:
    """How many steps an optimizer had behind it when a scaler without a past began to serve it; 0: none known."""
    steps = details(row.evidence).get("optimizer_steps")
    return steps if isinstance(steps, int) else 0


def loop_steps(scalers: Sequence[ResumedScaler]) -> Callable[[int], int | None]:
    """A function from a step of the run to the loop's own number of it, where the checkpoint tells another.

    Args:
        scalers: Those of the run; what a checkpoint says of its loop counts where one alone can be meant.
    """
    known = {each.start.step: each.saved_at[0] for each in reversed(scalers) if len(each.saved_at) == 1}
    starts = sorted({each.start.step for each in scalers})
    ahead: dict[int, int | None] = {}  # of each resumed segment, how far the run's numbers are ahead

    def in_loop(step: int) -> int | None:
        shift = next((ahead[start] for start in reversed(starts) if start <= step), 0)
        return step - shift if shift is not None else None

    for start in starts:
        latest = in_loop(known[start] - 1) if start in known else None  # that the checkpoint knows
        ahead[start] = start - latest - 1 if latest is not None else None
    return lambda step: own if (own := in_loop(step)) != step else None


def _resumed(starts: Sequence[ScalerEventRow]) -> Iterator[tuple[ScalerEventRow, list[int]]]:
    """The beginning of each scaler of a resumed segment, with the numbers of the scalers whose place it takes.

    A segment's scalers take the places of those of the segment before in the order in which they first scaled.
    """
    scalers: dict[int, list[int]] = {}
    for start in starts:
        scalers.setdefault(start.segment, []).append(start.scaler)
    for start in starts:
        place = scalers[start.segment].index(start.scaler)
        if place < len(scalers.get(start.segment - 1, ())):
            segments = (scalers.get(segment, []) for segment in range(start.segment))
            yield start, [each[place] for each in segments if place < len(each)]


def _saved_at(run: Run, rank: int, began: ScalerEventRow, scalers: Sequence[int]) -> list[int]:
    """The steps before which one of these scalers saved the state with which another one began, or was loaded."""
    if began.scale_after is None or not math.isfinite(began.scale_after):
        return []
    tracker = details(began.detail).get("_growth_tracker", began.growth_tracker)
    found = collect_expressions(
        rank_table(run, Table.SCALER_EVENTS, rank),
        "step, detail",
        where=f"action = '{ScalerAction.STATE_SAVED}' AND scale_after = {began.scale_after!r} "
        f"AND scaler IN ({', '.join(map(str, scalers))})",
        order="step",
    )
    return [int(step) for step, detail in found if tracker in (None, details(detail).get("_growth_tracker"))]


def _last_scale(run: Run, rank: int, segment: int, scaler: int) -> float | None:
    """The newest scale that is known of a scaler; None where none is."""
    found = collect_expressions(
        rank_table(run, Table.SCALER_EVENTS, rank),
        "time, step, action, scale_after",
        where=f"segment = {segment} AND scaler = {scaler} AND scale_after IS NOT NULL AND action NOT IN ({_ROUTINE})",
        order="time DESC, step DESC",
        limit=_MOST_AT_ONCE,
    )
    known = sorted((time, step, _ORDER.index(action), scale) for time, step, action, scale in found if action in _ORDER)
    return float(known[-1][3]) if known else None
