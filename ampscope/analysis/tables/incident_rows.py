"""The incidents of one rank: of most runs all are read at once, of one with millions those that are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from ampscope.analysis.tables.lazy_tables import collect, collect_groups, rank_table
from ampscope.trace.read.run import Run
from ampscope.trace.schema import IncidentRow, Table

#: Incidents that are read at once.
MOST_AT_ONCE = 2000


class IncidentRows:
    """The rows of one rank."""

    def __init__(self, run: Run, rank: int) -> None:
        self._run = run
        self._rank = rank

    def find(self, step: int, optimizer: int, trigger: str) -> IncidentRow | None:
        """The incident of a step; the newest where there are several of that kind, None where there is none."""
        alike = [row for row in self._of_step(step) if (row.optimizer, row.trigger) == (optimizer, trigger)]
        return alike[-1] if alike else None

    def alike(self, row: IncidentRow) -> int:
        """How many steps of the same optimizer have an incident with the same trigger and the same kind of replay."""
        return self._steps_by_kind.get((row.optimizer, row.trigger, row.replay), 0)

    def _of_step(self, step: int) -> Sequence[IncidentRow]:
        if self._by_step is None:
            return self._run.rows(Table.INCIDENTS, rank=self._rank, step=step)
        return self._by_step.get(step, ())

    @cached_property
    def _by_step(self) -> Mapping[int, Sequence[IncidentRow]] | None:
        """All of them; None where they are too many."""
        steps = rank_table(self._run, Table.INCIDENTS, self._rank).select("step")
        if len(collect(steps.head(MOST_AT_ONCE + 1))) > MOST_AT_ONCE:
            return None
        rows: dict[int, list[IncidentRow]] = {}
        for row in self._run.rows(Table.INCIDENTS, rank=self._rank):
            rows.setdefault(row.step, []).append(row)
        return rows

    @cached_property
    def _steps_by_kind(self) -> dict[tuple[int, str, str], int]:
        kind = 'optimizer, "trigger", replay'
        rows = rank_table(self._run, Table.INCIDENTS, self._rank)
        counted = collect_groups(rows, f"{kind}, count(DISTINCT step)", kind)
        return {(optimizer, trigger, replay): count for optimizer, trigger, replay, count in counted}
