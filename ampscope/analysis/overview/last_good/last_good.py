"""When a run was last good before an incident, and what has moved since, the most unusual first."""

from __future__ import annotations

from collections.abc import Iterator

from ampscope.analysis.overview.last_good.curves import moved_curves
from ampscope.analysis.overview.last_good.good_steps import GoodSteps, good_steps
from ampscope.analysis.overview.last_good.kinds import moved_kinds
from ampscope.analysis.overview.last_good.sampled import Sampled, sampled
from ampscope.analysis.overview.last_good.segments import resumed
from ampscope.analysis.overview.last_good.unusual import UNUSUAL
from ampscope.analysis.overview.last_good.values import compared, moved_values
from ampscope.analysis.overview.last_good.words import none_good, summary
from ampscope.analysis.results import Incident, LastGood, Move, MoveKind
from ampscope.analysis.tables.step_history import histories
from ampscope.trace.json_columns import details
from ampscope.trace.read.run import Run
from ampscope.trace.schema import EventKind, Table, Trigger
from ampscope.trace.vocabulary import Cause, Severity

#: Moves that are told.
MOST_TOLD = 8
#: What is looked for at every step, or fails the very step; of all else a step before may have had it, unseen.
_EACH_STEP = frozenset(
    {
        Trigger.NONFINITE_GRADIENT,
        Trigger.NONFINITE_LOSS,
        Trigger.NONFINITE_BUFFER,
        Trigger.NONFINITE_WEIGHT,
        Trigger.EXCEPTION,
    }
)
#: What a step is given; the rest comes of it.
_GIVEN = frozenset(
    {
        *(MoveKind.SEGMENT, MoveKind.SCALE, MoveKind.LEARNING_RATE),
        *(MoveKind.DTYPE, MoveKind.SHAPE, MoveKind.BATCH),
    }
)


def last_good(run: Run, incident: Incident) -> LastGood | None:
    """The last good step before an incident, and what has moved since.

    Returns:
        None for what is harmless, has not happened yet, or may have been so before, as nobody looks at every step.
    """
    if incident.severity is Severity.INFO or incident.cause.is_ahead:
        return None
    if incident.trigger not in _EACH_STEP and incident.cause is not Cause.SPIKE:
        return None
    written = incident.written_by
    step = incident.step if written is None else min(incident.step, written.step)
    optimizer = _optimizer(run, incident)
    history = histories(run, incident.rank).get(optimizer)
    good = good_steps(run, incident.rank, history, step) if history is not None else None
    if good is None:
        return LastGood(step=None, summary=none_good(step))
    seen = sampled(run, incident.rank, optimizer, good)
    moves = sorted(_moves(run, incident.rank, good, seen), key=_rank)
    return LastGood(
        step=good.last,
        calm_step=good.calm,
        sampled_step=int(seen.steps[-1]) if seen is not None else None,
        summary=summary(good.last, good.calm, moves, None if seen is None else compared(seen, good)),
        moves=tuple(moves[:MOST_TOLD]),
    )


def _moves(run: Run, rank: int, good: GoodSteps, seen: Sampled | None) -> Iterator[Move]:
    yield from resumed(run.manifest, good)
    yield from moved_curves(run, rank, good)
    if seen is not None:
        yield from moved_kinds(seen, good)
        yield from moved_values(seen, good)


def _rank(move: Move) -> tuple[int, float]:
    """What is unusual and given, what is unusual and came of it, what was seen too rarely, what moves always."""
    if move.score is None:
        return 2, -move.seen
    if move.score < UNUSUAL:
        return 3, -move.score
    return (0 if move.kind in _GIVEN else 1), -move.score


def _optimizer(run: Run, incident: Incident) -> int:
    """The number of the optimizer whose step went wrong."""
    if incident.cause is Cause.SPIKE:
        spikes = run.rows(Table.EVENTS, rank=incident.rank, kind=EventKind.SPIKE, step=incident.step)
        found = [details(row.text).get("optimizer") for row in spikes]
        return next((each for each in found if isinstance(each, int)), 0)
    rows = run.rows(Table.INCIDENTS, rank=incident.rank, step=incident.step)
    return next((row.optimizer for row in rows if row.trigger == incident.trigger), 0)
