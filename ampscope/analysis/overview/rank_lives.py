"""All ranks at a glance: how far each came, where the run went wrong first, who received it, and that in sentences.

Ranks lag by steps, which need no clock. How long a rank has been silent is told by the age of its files against that of
the newest file of any rank: all lie on one file system, and no clock of one host is set against another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

import numpy as np

from ampscope.analysis.arrays import IntArray
from ampscope.analysis.causes.ranks import Apart, Shared
from ampscope.analysis.overview.bad_steps import (
    BadAttempt,
    World,
    bad_steps,
    sightings,
    steps_by_rank,
    world_of,
    written_steps,
)
from ampscope.analysis.overview.replicas import Replicas, replicas
from ampscope.analysis.tables.lazy_tables import collect_rows
from ampscope.analysis.words import capitalized, ranks_in_words
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.files.folder_lock import is_locked
from ampscope.trace.files.layout import rank_folder
from ampscope.trace.read.run import Run
from ampscope.trace.schema import EventKind, Table

#: Rows and columns that a picture of the whole has at most.
ROWS, COLUMNS = 64, 160


class CellState(IntEnum):
    """The worst that happened in a cell, the least first."""

    NOTHING = 0  #: no step was recorded
    STEPPED = 1
    SKIPPED = 2
    AFTERMATH = 3  #: the weights were not finite before the step
    RECEIVED = 4  #: a value that is not finite came from another rank
    APART = 5  #: the rank differed from its replicas
    ORIGIN = 6  #: a value that is not finite was born here


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepGrid:
    """Cells of ranks by steps. Row r holds ranks ``r * ranks_each`` and on, column c the steps from `first_step` on."""

    ranks: int = 0
    ranks_each: int = 1
    first_step: int = 0
    last_step: int = 0
    steps_each: int = 1
    cells: IntArray = field(default_factory=lambda: np.zeros((0, 0), np.int64))  #: `CellState`

    @property
    def is_empty(self) -> bool:
        """Whether no step was recorded."""
        return self.cells.size == 0

    def ranks_of(self, row: int) -> tuple[int, int]:
        """The first and the last rank of a row."""
        first = row * self.ranks_each
        return first, min(first + self.ranks_each, self.ranks) - 1

    def steps_of(self, column: int) -> tuple[int, int]:
        """The first and the last step of a column."""
        first = self.first_step + column * self.steps_each
        return first, min(first + self.steps_each - 1, self.last_step)


def step_grid(run: Run, world: World, bad: Iterable[BadAttempt], apart: Iterable[Apart]) -> StepGrid:
    """The picture of all ranks over all steps.

    Args:
        run: The run.
        world: Its ranks.
        bad: Its bad steps.
        apart: Ranks that differ from their replicas.
    """
    steps = steps_by_rank(run)
    if not steps:
        return StepGrid()
    low, high = min(each.first for each in steps.values()), max(each.last for each in steps.values())
    by_rank, by_step = math.ceil(world.size / ROWS), math.ceil((high - low + 1) / COLUMNS)
    cells = np.zeros((math.ceil(world.size / by_rank), (high - low) // by_step + 1), np.int64)
    for each in steps.values():
        first, last = (each.first - low) // by_step, (each.last - low) // by_step
        cells[each.rank // by_rank, first : last + 1] = CellState.STEPPED
    where = f"rank // {by_rank}, (step - {low}) // {by_step}"
    for row, column in collect_rows(run.table(Table.STEPS), where, where, where="skipped"):
        cells[row, column] = CellState.SKIPPED
    grid = StepGrid(
        ranks=world.size, ranks_each=by_rank, first_step=low, last_step=high, steps_each=by_step, cells=cells
    )
    _mark_apart(grid, apart)
    _mark_bad(grid, bad)
    return grid


def _mark_bad(grid: StepGrid, bad: Iterable[BadAttempt]) -> None:
    for each in bad:
        own = CellState.ORIGIN if each.since is None else CellState.AFTERMATH
        for seen, state in ((each.received, CellState.RECEIVED), (each.origins, own)):
            for one in seen:
                _mark(grid, one.rank, one.step, state)


def _mark_apart(grid: StepGrid, apart: Iterable[Apart]) -> None:
    for each in apart:
        for rank in each.ranks:
            for step in range(each.step, each.last_step + 1, grid.steps_each):
                _mark(grid, rank, step, CellState.APART)


def _mark(grid: StepGrid, rank: int, step: int, state: CellState) -> None:
    row, column = rank // grid.ranks_each, (step - grid.first_step) // grid.steps_each
    if row < grid.cells.shape[0] and 0 <= column < grid.cells.shape[1]:
        grid.cells[row, column] = max(grid.cells[row, column], state)


class RankLife(StrEnum):
    """Whether a rank is still there."""

    WRITING = "writing"  #: a living process writes its tables
    CLOSED = "closed"  #: it was closed
    DIED = "died"  #: its process ended without closing it
    MISSING = "missing"  #: nothing of it is in the trace


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank at a glance; null means not recorded."""

    rank: int
    life: RankLife
    steps: int = 0
    last_step: int | None = None
    behind: int | None = None  #: steps that the rank that came furthest is ahead
    silent_s: float | None = None  #: seconds from its last sign of life to the newest of any rank; null once closed
    skipped: int = 0
    loss: float | None = None  #: of its newest step
    mean_loss: float | None = None  #: over the steps at which it was finite
    step_seconds: float | None = None  #: mean duration of a step
    origins: int = 0  #: bad steps that began on it
    received: int = 0  #: bad steps that it got from another


_LIVES = (
    f"rank, max(CASE WHEN kind = '{EventKind.CLOSE}' THEN segment END), "
    f"max(CASE WHEN kind IN ('{EventKind.START}', '{EventKind.RESUME}') THEN segment END)"
)


def rank_states(run: Run, world: World, bad: Sequence[BadAttempt]) -> tuple[RankState, ...]:
    """Every rank of the world, those of which nothing is there among them.

    Args:
        run: The run.
        world: Its ranks.
        bad: Its bad steps.
    """
    closed = {row[0] for row in collect_rows(run.table(Table.EVENTS), _LIVES, "rank") if _is_closed(row[1], row[2])}
    signs = {rank: _last_sign(run, rank) for rank in world.present}
    newest = max(signs.values())
    here, steps = set(world.present), steps_by_rank(run)
    furthest = max((each.last for each in steps.values()), default=0)
    origins = Counter(one.rank for each in bad if each.since is None for one in each.origins)
    received = Counter(one.rank for each in bad for one in each.received)
    found = []
    for rank in range(world.size):
        state = RankState(
            rank=rank,
            life=_life(run, rank, closed) if rank in here else RankLife.MISSING,
            silent_s=newest - signs[rank] if rank in signs and rank not in closed else None,
        )
        if (own := steps.get(rank)) is not None:
            state = replace(
                state,
                steps=own.steps,
                last_step=own.last,
                behind=furthest - own.last,
                skipped=own.skipped,
                loss=own.last_loss,
                mean_loss=own.loss,
                step_seconds=own.seconds,
                origins=origins[rank],
                received=received[rank],
            )
        found.append(state)
    return tuple(found)


def _life(run: Run, rank: int, closed: Collection[int]) -> RankLife:
    if rank in closed:
        return RankLife.CLOSED
    return RankLife.WRITING if is_locked(rank_folder(run.path, rank)) else RankLife.DIED


def _is_closed(closed: int | None, began: int | None) -> bool:
    return closed is not None and closed >= (began or 0)


def _last_sign(run: Run, rank: int) -> float:
    """When the rank's files last changed, in seconds of the file system's clock."""
    return (
        max((age for table in (Table.STEPS, Table.EVENTS) for _, _, age in run.stamp(table, rank=rank)), default=0)
        / 1e9
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks(NotebookRepr):
    """The ranks of a run."""

    world: World = field(default_factory=World)
    states: tuple[RankState, ...] = ()  #: every rank, those that are missing among them
    bad: tuple[BadAttempt, ...] = ()  #: the first first
    replicas: Replicas = field(default_factory=Replicas)
    grid: StepGrid = field(default_factory=StepGrid)

    def of_life(self, life: RankLife) -> tuple[int, ...]:
        """The ranks that are so."""
        return tuple(state.rank for state in self.states if state.life is life)

    @property
    def lagging(self) -> tuple[RankState, ...]:
        """Ranks that recorded fewer steps than the one that came furthest, the last first."""
        behind = [state for state in self.states if (state.behind or 0) > 1]
        return tuple(sorted(behind, key=lambda state: (-(state.behind or 0), state.rank)))


def ranks_at_a_glance(run: Run) -> Ranks:
    """The ranks of ``run`` with the picture of all their steps; of one that has none yet, an empty one."""
    seen = ranks_in_numbers(run)
    return replace(seen, grid=step_grid(run, seen.world, seen.bad, seen.replicas.apart))


def ranks_in_numbers(run: Run) -> Ranks:
    """`ranks_at_a_glance` without the picture."""
    world = world_of(run)
    last = {rank: steps.last for rank, steps in steps_by_rank(run).items()}
    bad = bad_steps(sightings(run), last, world.size, written_steps(run))
    return Ranks(world=world, states=rank_states(run, world, bad), bad=tuple(bad), replicas=replicas(run))


#: Ranks that lag and are named one by one.
_NAMED = 3
#: Seconds of silence that are told.
_QUIET_S = 60.0


_NO_REPLICAS = "No two ranks have the same gradients after the reduction, so there are no replicas to compare."
_NOT_COMPARED = (
    "Whether ranks are replicas is not known: too few of the first steps had finite gradients on two of them."
)


def ranks_story(seen: Ranks) -> tuple[str, ...]:
    """The ranks in a few sentences; none of a run of one."""
    return tuple(_sentences(seen)) if seen.world.is_shared else ()


def _sentences(seen: Ranks) -> Iterator[str]:
    here = len(seen.world.present)
    yield f"{here:,} of {seen.world.size:,} ranks {'is' if here == 1 else 'are'} in this trace."
    if seen.world.missing:
        yield f"Nothing is there of {ranks_in_words(seen.world.missing)}: not watched, or it never began."
    yield from _first_bad(seen)
    yield from _lag(seen)
    yield from _agreement(seen)


def _first_bad(seen: Ranks) -> Iterator[str]:
    failed = next((each for each in seen.bad if each.origins and each.received), None)
    if failed is not None:
        origins = ranks_in_words([one.rank for one in failed.origins])
        received = ranks_in_words([one.rank for one in failed.received])
        yield f"Step {failed.step:,} is the first whose failure spread: it began on {origins}; {received} received it."


def _lag(seen: Ranks) -> Iterator[str]:
    dead = seen.of_life(RankLife.DIED)
    if dead:
        yield f"{capitalized(ranks_in_words(dead))} ended without being closed."
    for state in seen.lagging[:_NAMED]:
        quiet = state.silent_s or 0.0
        silent = f", and was silent for the last {quiet:,.0f} s" if quiet > _QUIET_S else ""
        yield f"Rank {state.rank:,} stopped at step {state.last_step:,}, {state.behind:,} steps behind{silent}."
    if len(seen.lagging) > _NAMED:
        yield f"{len(seen.lagging) - _NAMED:,} more ranks are behind."


def _agreement(seen: Ranks) -> Iterator[str]:
    groups = seen.replicas.groups
    silent = [each.rank for each in seen.states if each.life is not RankLife.MISSING and each.last_step is None]
    compared = len(seen.world.present) - len(silent)
    if silent and compared:
        nothing = "; nothing was compared" if compared < 2 else ""
        yield f"{capitalized(ranks_in_words(silent))} recorded no step{nothing}."
    if compared < 2:
        return
    if not groups:
        yield _NO_REPLICAS if seen.replicas.compared else _NOT_COMPARED
        return
    apart = {rank for each in seen.replicas.apart for rank in each.ranks}
    sets = f"{len(groups):,} sets of replicas" if len(groups) > 1 else f"{len(groups[0]):,} ranks are replicas"
    if not apart:
        yield f"{sets}: gradient norm, loss scale and skips agree at every step."
    for each in seen.replicas.apart:
        yield _parted(each)


_SHARED = {
    Shared.GRAD_NORM: "gradient norm",
    Shared.SCALE: "loss scale",
    Shared.SKIPPED: "decision to skip",
    Shared.WEIGHTS: "weights",
}


def _parted(apart: Apart) -> str:
    who = capitalized(ranks_in_words(apart.ranks))
    what = _SHARED[apart.what]
    if apart.for_good:
        return f"{who} no longer have the same {what} since step {apart.step:,}: they train apart, by design or not."
    others = f"the {len(apart.others):,} others" if apart.others else "one another"
    verb = "differs" if len(apart.ranks) == 1 else "differ"
    times = "steps" if apart.steps > 1 else "step"
    if apart.what is Shared.WEIGHTS:
        held = f"{'holds' if len(apart.ranks) == 1 else 'hold'} other weights than {others}"
        return f"Of the traced steps, {apart.step:,} is the first at which {ranks_in_words(apart.ranks)} {held}."
    return f"{who} {verb} from {others} in the {what} at {apart.steps:,} {times}, first at step {apart.step:,}."
