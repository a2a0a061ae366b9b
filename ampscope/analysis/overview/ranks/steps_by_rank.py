"""The steps of every rank, summed up in one pass over all of them."""

from __future__ import annotations

from typing import NamedTuple

from ampscope.analysis.tables.lazy_tables import collect_groups
from ampscope.analysis.tables.remembered import remembered
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
    """What each rank recorded; ranks without a step are left out."""
    return {row[0]: RankSteps(*row) for row in collect_groups(run.table(Table.STEPS), _SUMS, "rank")}
