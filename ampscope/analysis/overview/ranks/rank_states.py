"""How far each rank came, what it lost, and whether it is still heard of; no clock of one host is set against another.

Ranks lag by steps, which need no clock. How long a rank has been silent is told by the age of its files against that of
the newest file of any rank: all lie on one file system.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ampscope.analysis.overview.ranks.bad_steps import BadStep
from ampscope.analysis.overview.ranks.steps_by_rank import RankSteps, steps_by_rank
from ampscope.analysis.overview.ranks.world import World
from ampscope.analysis.tables.lazy_tables import collect_groups
from ampscope.trace.files.folder_lock import is_locked
from ampscope.trace.files.layout import rank_folder
from ampscope.trace.read.run import Run
from ampscope.trace.schema import EventKind, Table


class Life(StrEnum):
    """Whether a rank is still there."""

    WRITING = "writing"  #: a living process writes its tables
    CLOSED = "closed"  #: it was closed
    DIED = "died"  #: its process ended without closing it
    MISSING = "missing"  #: nothing of it is in the trace


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank at a glance; null means not recorded."""

    rank: int
    life: Life
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


def rank_states(run: Run, world: World, bad: Sequence[BadStep]) -> tuple[RankState, ...]:
    """Every rank of the world, those of which nothing is there among them.

    Args:
        run: The run.
        world: Its ranks.
        bad: Its bad steps.
    """
    closed = {row[0] for row in collect_groups(run.table(Table.EVENTS), _LIVES, "rank") if _is_closed(row[1], row[2])}
    signs = {rank: _last_sign(run, rank) for rank in world.present}
    newest = max(signs.values())
    here, parts = set(world.present), _Parts(bad)
    states = {rank: _life(run, rank, closed) if rank in here else Life.MISSING for rank in range(world.size)}
    silent = {rank: newest - sign for rank, sign in signs.items() if rank not in closed}
    steps = steps_by_rank(run)
    furthest = max((each.last for each in steps.values()), default=0)
    return tuple(
        _state(rank, life, steps.get(rank), furthest, silent.get(rank), parts) for rank, life in states.items()
    )


class _Parts:
    """How many bad steps began on each rank, and how many reached it."""

    def __init__(self, bad: Sequence[BadStep]) -> None:
        self.origins = Counter(one.rank for each in bad if each.since is None for one in each.origins)
        self.received = Counter(one.rank for each in bad for one in each.received)


def _state(  # noqa: PLR0917  # one value of each kind for one rank
    rank: int, life: Life, steps: RankSteps | None, furthest: int, silent: float | None, parts: _Parts
) -> RankState:
    if steps is None:
        return RankState(rank=rank, life=life, silent_s=silent)
    return RankState(
        rank=rank,
        life=life,
        steps=steps.steps,
        last_step=steps.last,
        behind=furthest - steps.last,
        silent_s=silent,
        skipped=steps.skipped,
        loss=steps.last_loss,
        mean_loss=steps.loss,
        step_seconds=steps.seconds,
        origins=parts.origins[rank],
        received=parts.received[rank],
    )


def _life(run: Run, rank: int, closed: Collection[int]) -> Life:
    if rank in closed:
        return Life.CLOSED
    return Life.WRITING if is_locked(rank_folder(run.path, rank)) else Life.DIED


def _is_closed(closed: int | None, began: int | None) -> bool:
    return closed is not None and closed >= (began or 0)


def _last_sign(run: Run, rank: int) -> float:
    """When the rank's files last changed, in seconds of the file system's clock."""
    return (
        max((age for table in (Table.STEPS, Table.EVENTS) for _, _, age in run.stamp(table, rank=rank)), default=0)
        / 1e9
    )
