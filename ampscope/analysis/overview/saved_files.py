"""The files that a loop saved its state to: which is the last of a run that went bad, and which are spoilt, is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from ampscope.analysis.overview.bad_steps import sightings, written_steps
from ampscope.analysis.results import Incident, SavedFile, SavedFiles
from ampscope.analysis.tables.step_history import History
from ampscope.trace.evidence import Evidence
from ampscope.trace.read.run import Run
from ampscope.trace.schema import EventKind, EventRow, IncidentRow, Looked, StateKind, Table, Trigger
from ampscope.trace.schema.tables import details, names
from ampscope.trace.vocabulary import HELD_OPTIMIZER, HELD_WEIGHTS, LOOK_EVERY, Cause

_ALL = frozenset({HELD_WEIGHTS, HELD_OPTIMIZER})
_HELD_BY: dict[str, frozenset[str]] = {
    StateKind.WEIGHT: frozenset({HELD_WEIGHTS}),
    StateKind.BUFFER: frozenset(),  # a file of weights may have been saved without it, and a loop may write it anew
    StateKind.OPTIMIZER: frozenset({HELD_OPTIMIZER}),
    StateKind.SETTING: _ALL,  # the weights take its value
}
_STATE = {Cause.BAD_WEIGHT: StateKind.WEIGHT, Cause.BAD_BUFFER: StateKind.BUFFER}


class _Saved(NamedTuple):
    """One time that a file was written."""

    path: str
    holds: frozenset[str]
    whole: frozenset[str]  #: of which it holds all
    after: Mapping[int, int]  #: by number of the optimizer, the last step before; -1 for none
    within: bool  #: another step was in progress, which may have moved weights
    segment: int

    @property
    def step(self) -> int:
        """The first optimizer's last step before; -1 for none."""
        return self.after.get(0, -1)

    @property
    def told(self) -> SavedFile:
        """The file as it is told."""
        return SavedFile(
            path=self.path, step=self.step, holds=_in_order(self.holds), parts=_in_order(self.holds - self.whole)
        )


def _in_order(kinds: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(kinds, reverse=True))


class _Ruin(NamedTuple):
    """State that was whole up to some step, and is known not to be after a later one."""

    optimizer: int  #: by which the steps are counted
    whole_until: int  #: the last step after which it is known to have been whole; -2 for none
    bad_from: int  #: the first after which it is known not to be
    holds: frozenset[str]  #: what of the state is not
    segment: int


class _Is(Enum):
    WHOLE = auto()
    SPOILT = auto()
    UNKNOWN = auto()


def saved_files(run: Run, incidents: Sequence[Incident], history: Mapping[int, History]) -> SavedFiles | None:
    """Tells the files that a run saved its state to by whether they are whole; None: there are none, or all of it is.

    Args:
        run: The run.
        incidents: Everything that went wrong.
        history: The steps of one of its ranks, by optimizer.
    """
    saves = _saves(run)
    if not saves:
        return None
    found = [*_found_bad(run), *_written(run, incidents, history), *_came_in(run, incidents, history)]
    if not found:
        return None
    ruins = [_unless_mended(each, history) for each in found]
    latest = {each.path: each for each in saves}
    now = {path: _judged(each, ruins) for path, each in latest.items()}
    full = max(map(_fullness, saves))
    whole = [each for each in saves if _fullness(each) == full and _judged(each, ruins) is _Is.WHOLE]
    kept = [each for each in whole if latest[each.path] is each]
    last = next(reversed(kept or whole), None)
    again = latest[last.path] if last is not None and not kept else None
    unknown = [latest[path].step for path, state in now.items() if state is _Is.UNKNOWN]
    return SavedFiles(
        last_whole=last.told if last is not None else None,
        written_again=again.step if again is not None else None,
        spoilt=sum(state is _Is.SPOILT for state in now.values()),
        unknown=len(unknown),
        unknown_from=min(unknown, default=None),
        unknown_to=max(unknown, default=None),
    )


def _saves(run: Run) -> list[_Saved]:
    """All times that a file was written, in order."""
    rows = sorted(run.rows(Table.EVENTS, kind=EventKind.SAVED), key=lambda row: row.time)
    return [each for each in map(_saved, rows) if each.path and each.holds]


def _saved(row: EventRow) -> _Saved:
    told = details(row.text)
    path, after = told.get("path"), told.get("after")
    steps = after.items() if isinstance(after, dict) else ()
    by_number = {int(key): step for key, step in steps if key.isdecimal() and len(key) < 6 and isinstance(step, int)}
    holds, whole = (_ALL.intersection(names(row.text, key)) for key in ("holds", "whole"))
    return _Saved(path if isinstance(path, str) else "", holds, whole, by_number, told.get("open") is True, row.segment)


def _fullness(saved: _Saved) -> int:
    """Orders files by what of the weights they hold: all, a part, nothing."""
    return (HELD_WEIGHTS in saved.holds) + (HELD_WEIGHTS in saved.whole)


def _judged(saved: _Saved, ruins: Sequence[_Ruin]) -> _Is:
    found = {_beside(saved, ruin) for ruin in ruins}
    return next((each for each in (_Is.SPOILT, _Is.UNKNOWN) if each in found), _Is.WHOLE)


def _beside(saved: _Saved, ruin: _Ruin) -> _Is:
    after = saved.after.get(ruin.optimizer, -1)
    if saved.segment > ruin.segment:  # the loop may have gone on from a file that is whole
        return _Is.UNKNOWN
    if after + saved.within <= ruin.whole_until:
        return _Is.WHOLE
    spoilt = saved.segment == ruin.segment and after >= ruin.bad_from and saved.whole & ruin.holds
    return _Is.SPOILT if spoilt else _Is.UNKNOWN


# -- what is known of the state ---------------------------------------------------------------------------------------


def _found_bad(run: Run) -> Iterator[_Ruin]:
    """State that a look found not to be finite, and buffers that a step wrote so."""
    for trigger in (Trigger.NONFINITE_WEIGHT, Trigger.NONFINITE_BUFFER, Trigger.NONFINITE_STATE):
        for row in run.rows(Table.INCIDENTS, trigger=trigger):
            yield from _of_row(row)


def _of_row(row: IncidentRow) -> Iterator[_Ruin]:
    evidence = Evidence.of(row)
    for each in evidence.state:
        if each.kind in _HELD_BY and each.when != Looked.FORESEEN:
            finite_at = -2 if each.finite_at is None else each.finite_at
            whole = finite_at - (each.kind == StateKind.SETTING)  # it is set after a step
            yield _Ruin(row.optimizer, whole, each.bad_at, _HELD_BY[each.kind], row.segment)
    if not evidence.state and row.trigger == Trigger.NONFINITE_BUFFER:
        whole = min(evidence.finite_at.values(), default=row.step - 1)
        yield _Ruin(row.optimizer, whole, row.step, _HELD_BY[StateKind.BUFFER], row.segment)


def _written(run: Run, incidents: Sequence[Incident], history: Mapping[int, History]) -> Iterator[_Ruin]:
    """Steps whose gradients were not finite and which their optimizer took, where no good step came after."""
    found_so = {each.step for each in incidents if each.cause in _STATE}
    for number, steps in history.items():
        first = min((step for optimizer, step in written_steps(run) if optimizer == number), default=None)
        if first is None or first in found_so:
            continue
        if not _goes_well_after(steps, first):
            yield _Ruin(number, first - 1, first, _ALL, _segment(run, first, number))


def _goes_well_after(steps: History, step: int) -> bool:
    good = ~steps.skipped & np.isfinite(steps.grad_norm) & np.isfinite(steps.loss) & (steps.step > step)
    return bool(good.any())


def _unless_mended(ruin: _Ruin, history: Mapping[int, History]) -> _Ruin:
    """A ruin of weights that good steps followed spoils no file for certain: the loop may have loaded them anew."""
    steps = history.get(ruin.optimizer)
    mended = HELD_WEIGHTS in ruin.holds and steps is not None and _goes_well_after(steps, ruin.bad_from)
    return ruin._replace(holds=frozenset()) if mended else ruin


def _came_in(run: Run, incidents: Sequence[Incident], history: Mapping[int, History]) -> Iterator[_Ruin]:
    """Weights and buffers that a step found so: who wrote them is known, or when all was looked at last."""
    looked = {Trigger.NONFINITE_WEIGHT, Trigger.NONFINITE_BUFFER, Trigger.NONFINITE_STATE}
    for each in incidents:
        if each.cause not in _STATE or each.trigger in looked:
            continue
        number = next((one.optimizer for one in sightings(run) if (one.step, one.rank) == (each.step, each.rank)), 0)
        segment = _segment(run, each.step, number)
        holds = _HELD_BY[_STATE[each.cause]]
        if each.written_by is not None:
            yield _Ruin(number, each.written_by.step - 1, each.written_by.step, holds, segment)
        elif number in history:
            yield _Ruin(number, _last_look(history[number], each.step), each.step - 1, holds, segment)


def _last_look(steps: History, before: int) -> int:
    """The last step of those before one after which all weights and state were looked at; -2 for none."""
    step = steps.step[(steps.step < before) & ~steps.skipped]
    due = step[(step % LOOK_EVERY == 0) | ((step < LOOK_EVERY) & ((step & (step - 1)) == 0))]
    return int(due[-1]) if due.size else -2


def _segment(run: Run, step: int, optimizer: int) -> int:
    return next((row.segment for row in run.rows(Table.STEPS, step=step, optimizer=optimizer)), 0)
