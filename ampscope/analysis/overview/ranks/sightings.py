"""What was seen to go wrong, on every rank: incidents, and losses that were not finite though no incident tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import starmap

from ampscope.analysis.overview.ranks.bad_steps import Sighting
from ampscope.analysis.overview.ranks.steps_by_rank import steps_by_rank
from ampscope.analysis.tables.lazy_tables import collect_expressions
from ampscope.analysis.tables.remembered import remembered
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ReplayStatus, Table, Trigger

#: Sightings that are read, the first first: a job of many ranks that goes on with NaN has millions.
MOST = 100_000
#: Losses without an incident that are told, of each rank and optimizer.
MOST_UNREPORTED = 60

_INCIDENT = (
    'step, optimizer, rank, "trigger", replay, loss, over_budget, true, hash("trigger", bad_params), '
    """contains(evidence, '"overflows": true')"""
)
#: Of the cast value, or the engine would leave out parts by their bounds, which say nothing of NaN.
_BAD_LOSS = "NOT isfinite(try_cast(loss AS FLOAT))"


@remembered(Table.INCIDENTS, Table.STEPS)
def sightings(run: Run) -> list[Sighting]:
    """Everything that was seen to go wrong, by step; of one step by rank, and in the order of its time."""
    rows = collect_expressions(run.table(Table.INCIDENTS), _INCIDENT, order="step, optimizer, rank, time", limit=MOST)
    numbers: dict[int, int] = {}
    recorded = [one._replace(symptom=numbers.setdefault(one.symptom, len(numbers))) for one in starmap(Sighting, rows)]
    return sorted([*recorded, *_unreported(run, recorded)], key=lambda one: (one.step, one.optimizer, one.rank))


def _unreported(run: Run, recorded: list[Sighting]) -> Iterator[Sighting]:
    """Steps whose loss was not finite although capture reported nothing (its replay may have been off)."""
    told = Counter(one.rank for one in recorded if one.has_bad_loss)
    if all(steps.bad_losses <= told[rank] for rank, steps in steps_by_rank(run).items()):
        return
    columns = "step, optimizer, rank, loss"
    bad = collect_expressions(run.table(Table.STEPS), columns, where=_BAD_LOSS, order=columns, limit=MOST)
    known = {(one.step, one.optimizer, one.rank) for one in recorded}
    found: Counter[tuple[int, int]] = Counter()
    for step, optimizer, rank, loss in bad:
        if (step, optimizer, rank) not in known and found[optimizer, rank] < MOST_UNREPORTED:
            found[optimizer, rank] += 1
            yield _of_loss(step, optimizer, rank, loss)


def _of_loss(step: int, optimizer: int, rank: int, loss: float) -> Sighting:
    return Sighting(step, optimizer, rank, Trigger.NONFINITE_LOSS, ReplayStatus.UNAVAILABLE, loss, recorded=False)
