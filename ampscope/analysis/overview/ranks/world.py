"""The ranks of a run are known by who has written, and their steps summed up in one pass over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ampscope.analysis.tables.lazy_tables import collect_groups, remembered
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table


class RankSteps(NamedTuple):
    """The steps that one rank recorded; null means not recorded."""

    rank: int
    steps: int  #: how many attempts
    first: int
    last: int
    skipped: int
    bad_losses: int  #: steps whose loss was recorded as not finite
    loss: float | None  #: mean over the steps at which it was finite
    last_loss: float | None
    seconds: float | None  #: mean duration of a step


_FINITE = "CASE WHEN isfinite(loss) THEN loss END"
_SUMS = (
    f"rank, count(*), min(step), max(step), count_if(skipped), count(loss) - count({_FINITE}), avg({_FINITE}), "
    "arg_max(loss, step), avg(duration_s)"
)


@remembered(Table.STEPS)
def steps_by_rank(run: Run) -> dict[int, RankSteps]:
    """Returns the recorded steps of each rank; ranks without a step are left out."""
    return {row[0]: RankSteps(*row) for row in collect_groups(run.table(Table.STEPS), _SUMS, "rank")}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks of a run."""

    size: int = 1  #: how many train together
    present: tuple[int, ...] = (0,)  #: those that have written, ascending

    @property
    def is_shared(self) -> bool:
        """Whether there is more than one."""
        return self.size > 1

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of which nothing is in the trace."""
        here = set(self.present)
        return tuple(rank for rank in range(self.size) if rank not in here)


def world_of(run: Run) -> World:
    """The ranks of ``run``; one of a run that has none yet."""
    present = tuple(run.ranks) or (0,)
    return World(size=max(run.manifest.world_size, present[-1] + 1), present=present)


def sampled_rank(run: Run, world: World) -> int:
    """The rank to ask what all of them do alike: the first whose steps were traced, else the first that made any."""
    traced = next((rank for rank in world.present if run.stamp(Table.OPS, rank=rank)), None)
    return min(steps_by_rank(run), default=world.present[0]) if traced is None else traced
