"""What was seen to go wrong, on every rank: incidents, and losses that were not finite though no incident tells."""

from __future__ import annotations

from ampscope.analysis.ranks.bad_steps import Sighting
from ampscope.analysis.tables.lazy_tables import collect_expressions
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ReplayStatus, Table, Trigger

#: Sightings that are read, the first first: a job of many ranks that goes on with NaN has millions.
MOST = 100_000
#: Losses without an incident that are told, of each rank and optimizer.
MOST_UNREPORTED = 60

_INCIDENT = (
    'step, optimizer, rank, "trigger", replay, loss, over_budget, hash("trigger", bad_params) % 9223372036854775783'
)
#: Of the cast value, or the engine would leave out parts by their bounds, which say nothing of NaN.
_BAD_LOSS = "NOT isfinite(try_cast(loss AS FLOAT))"


def sightings(run: Run) -> list[Sighting]:
    """Everything that was seen to go wrong, by step; of one step by rank, and in the order of its time."""
    rows = collect_expressions(run.table(Table.INCIDENTS), _INCIDENT, order="step, optimizer, rank, time", limit=MOST)
    recorded = [Sighting(*row[:7], symptom=row[7]) for row in rows]
    return sorted([*recorded, *_unreported(run, recorded)], key=lambda one: (one.step, one.optimizer, one.rank))


def _unreported(run: Run, recorded: list[Sighting]) -> list[Sighting]:
    """Steps whose loss was not finite although capture reported nothing (its replay may have been off)."""
    bad = collect_expressions(
        run.table(Table.STEPS),
        "step, optimizer, rank, loss",
        where=_BAD_LOSS,
        order="step, optimizer, rank",
        limit=MOST,
    )
    known = {(one.step, one.optimizer, one.rank) for one in recorded}
    left: dict[tuple[int, int], int] = {}
    found = []
    for step, optimizer, rank, loss in bad:
        if (step, optimizer, rank) not in known and left.setdefault((optimizer, rank), MOST_UNREPORTED) > 0:
            left[optimizer, rank] -= 1
            found.append(_of_loss(step, optimizer, rank, loss))
    return found


def _of_loss(step: int, optimizer: int, rank: int, loss: float) -> Sighting:
    return Sighting(step, optimizer, rank, Trigger.NONFINITE_LOSS, ReplayStatus.UNAVAILABLE, loss, recorded=False)


def last_steps(run: Run) -> dict[int, int]:
    """The newest step that each rank recorded."""
    rows = collect_expressions(run.table(Table.STEPS), "rank, max(step)", group="rank")
    return dict(rows)
