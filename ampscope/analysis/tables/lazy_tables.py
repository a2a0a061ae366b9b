"""A rank's tables are lazy frames whose errors people understand; results over all ranks are kept while tables stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import narwhals as nw
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ampscope.analysis.arrays import Columns
from ampscope.trace.files.arrow_arrays import known_in, numbers_in
from ampscope.trace.read.duckdb_engine import Engine, Query
from ampscope.trace.read.run import Run
from ampscope.trace.read.table_queries import engine_of
from ampscope.trace.schema import IncidentRow, Table

Lazy = nw.LazyFrame[Any]


def first_rank(run: Run) -> int:
    """The lowest rank that has written; 0 when none has."""
    return min(run.ranks, default=0)


def collect(frame: Lazy) -> list[dict[str, Any]]:
    """Run the query and give its rows.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    native, engine = _asked(frame)
    with engine.reading():
        names = engine.names(native)
        return [dict(zip(names, row, strict=True)) for row in engine.rows(native, Query())]


def stream_columns(frame: Lazy) -> Iterator[Columns]:
    """Run such a query and give its rows some at a time, in the order of the files where the engine keeps it.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    native, engine = _asked(frame)
    with engine.reading():
        for batch in engine.batches(native):
            yield Columns({name: _masked(batch[name]) for name in batch.schema.names})


def _masked(column: pa.Array) -> npt.NDArray[Any]:
    whole = pa.chunked_array([column])
    values = numbers_in(whole)
    return np.ma.masked_array(values, ~known_in(whole)) if column.null_count else values


def collect_rows(
    frame: Lazy,
    select: str,
    by: str = "",
    *,
    where: str = "",
    having: str = "",
    order: str = "",
    limit: int | None = None,
) -> list[tuple[Any, ...]]:
    """Run a query in DuckDB's words, which every engine understands, and give its rows.

    For what lazy frames have no words for.

    Args:
        frame: What is queried.
        select: What is selected, the columns that it is grouped ``by`` among it.
        by: What it is grouped by; not at all by default.
        where: Which rows; all by default.
        having: Which groups, by the names of what is selected; all by default.
        order: What it is sorted by; of groups the names of what is selected.
        limit: How many rows at most.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    native, engine = _asked(frame)
    with engine.reading():
        return engine.rows(native, Query(select, where, by, having, order, limit))


def collect_columns(frame: Lazy, select: str = "*", by: str = "", *, where: str = "") -> Columns:
    """Returns as arrays what `collect_rows` gives, for when there are many rows; a column of lists holds arrays.

    Args:
        frame: What is queried.
        select: What is selected; all columns by default.
        by: What it is grouped by; not at all by default.
        where: Which rows; all by default.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    native, engine = _asked(frame)
    with engine.reading():
        return Columns(engine.arrays(native, Query(select, where, by)))


def _asked(frame: Lazy) -> tuple[Any, Engine]:
    """Returns the native object of a lazy frame, and the engine that knows it."""
    native = nw.to_native(frame)
    return native, engine_of(native)


R = TypeVar("R")
Ranks = ParamSpec("Ranks")
Computed = Callable[Concatenate[Run, Ranks], R]


def remembered(*tables: Table) -> Callable[[Computed[Ranks, R]], Computed[Ranks, R]]:
    """Compute a result once for each open run, or for a rank of one, and state of ``tables``."""

    def decorate(compute: Computed[Ranks, R]) -> Computed[Ranks, R]:
        known: WeakKeyDictionary[Run, dict[Any, tuple[Any, R]]] = WeakKeyDictionary()

        @wraps(compute)
        def found(run: Run, /, *rank: Ranks.args, **named: Ranks.kwargs) -> R:
            of_run, key = known.setdefault(run, {}), (*rank, *named.values())
            ranks: Sequence[int | None] = [each for each in key if isinstance(each, int)] or [None]
            state = [run.stamp(table, rank=each) for table in tables for each in ranks]
            if key not in of_run or of_run[key][0] != state:
                of_run[key] = state, compute(run, *rank, **named)
            return of_run[key][1]

        return found

    return decorate


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
        steps = self._run.table(Table.INCIDENTS, rank=self._rank).select("step")
        if len(collect(steps.head(MOST_AT_ONCE + 1))) > MOST_AT_ONCE:
            return None
        rows: dict[int, list[IncidentRow]] = {}
        for row in self._run.rows(Table.INCIDENTS, rank=self._rank):
            rows.setdefault(row.step, []).append(row)
        return rows

    @cached_property
    def _steps_by_kind(self) -> dict[tuple[int, str, str], int]:
        kind = 'optimizer, "trigger", replay'
        rows = self._run.table(Table.INCIDENTS, rank=self._rank)
        counted = collect_rows(rows, f"{kind}, count(DISTINCT step)", kind)
        return {(optimizer, trigger, replay): count for optimizer, trigger, replay, count in counted}
