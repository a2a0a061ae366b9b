"""A run was last good at some step before an incident: when, whether it was resumed since, and what has moved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from ampscope.analysis.overview.last_good_curves import GoodSteps, good_steps, moved_curves
from ampscope.analysis.overview.last_good_values import SampledValues, compared, moved_kinds, moved_values, sampled
from ampscope.analysis.overview.unusual_moves import FIRST, UNUSUAL, none_good, summary
from ampscope.analysis.results import Incident, LastGood, Move, MoveKind
from ampscope.analysis.tables.step_history import histories
from ampscope.analysis.triggers import words_of
from ampscope.trace.manifest import Manifest
from ampscope.trace.read.run import Run
from ampscope.trace.schema import EventKind, Table
from ampscope.trace.schema.tables import details
from ampscope.trace.vocabulary import Cause, Severity

#: Attempts before an incident in which a resume is told.
LOOKBACK = 20
#: The score of a resume in which nothing else is known to be otherwise.
_PLAIN = 10.0
#: Changes that are told one by one.
_NAMED = 2


def resumed(manifest: Manifest, good: GoodSteps) -> Iterator[Move]:
    """The newest resume, if it was in the steps before an incident; each good step since makes it less unusual."""
    segments, steps = good.window.ints("segment"), good.window.ints("step")
    begins = np.flatnonzero(np.diff(segments) != 0) + 1
    if not begins.size or segments.size - int(begins[-1]) > LOOKBACK:
        return
    place = int(begins[-1])
    number, step = int(segments[place]), int(steps[place])
    known = 0 <= number < len(manifest.segments)
    changed = manifest.segments[number].changed if known else {}
    since = int(((steps >= step) & (steps <= good.calm) & good.good).sum())
    facts = [f"{name} {_word(was)}, now {_word(now)}" for name, (was, now) in changed.items()]
    more = f" and {len(facts) - _NAMED:,} more" if len(facts) > _NAMED else ""
    what = f" with {'; '.join(facts[:_NAMED])}{more}" if facts else ""
    first = next(iter(changed.values()), (None, None))
    yield Move(
        kind=MoveKind.SEGMENT,
        text=f"the run was resumed at step {step:,}{what}",
        before=_word(first[0]) if changed else str(number - 1),
        after=_word(first[1]) if changed else str(number),
        unit="setting" if changed else "segment",
        score=(FIRST if changed else _PLAIN) / (1 + since),
        seen=int(good.good[:place].sum()),
        step=step,
        name=next(iter(changed), ""),
    )


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


#: Moves that are told.
MOST_TOLD = 8
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
    if not words_of(incident.trigger).each_step and incident.cause is not Cause.SPIKE:
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


def _moves(run: Run, rank: int, good: GoodSteps, seen: SampledValues | None) -> Iterator[Move]:
    yield from resumed(run.manifest, good)
    yield from moved_curves(run, rank, good)
    if seen is not None:
        yield from moved_kinds(seen, good)
        yield from moved_values(seen, good)


def _rank(move: Move) -> tuple[int, float]:
    """Returns the order in which moves are told, as a sort key.

    First what is unusual and given to the step, then what is unusual and came of it, what was seen too rarely, and what
    moves always.
    """
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
