"""A rank's tables are lazy frames whose errors people understand; results over all ranks are kept while tables stay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from typing import Any, TypeVar
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


def rank_table(run: Run, table: Table, rank: int, *, step: int | Collection[int] | None = None) -> Lazy:
    """The rows of ``table`` that ``rank`` wrote: all, or those of a ``step`` or of some, whose files are read alone."""
    return run.table(table, step=step, rank=rank)


def collect(frame: Lazy) -> list[dict[str, Any]]:
    """Run the query and give its rows.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    native, engine = _asked(frame)
    with engine.reading():
        names = engine.names(native)
        return [dict(zip(names, row, strict=True)) for row in engine.rows(native, Query())]


def collect_columns(frame: Lazy) -> Columns:
    """Run a query whose columns are numbers and truth values.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    return _columns(frame, Query())


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


def collect_expressions(
    frame: Lazy, expressions: str, *, where: str = "", order: str = "", limit: int | None = None
) -> list[tuple[Any, ...]]:
    """Run a query in DuckDB's words, which every engine understands, and give its rows.

    For what lazy frames have no words for.

    Args:
        frame: What is queried.
        expressions: What is selected.
        where: Which rows; all by default.
        order: The columns that it is sorted by.
        limit: How many rows at most.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    return _rows(frame, Query(expressions, where, order=order, limit=limit))


def expression_columns(frame: Lazy, expressions: str, *, where: str) -> Columns:
    """Returns as arrays what `collect_expressions` gives, for when there are many rows; one of a list holds arrays.

    Args:
        frame: What is queried.
        expressions: What is selected.
        where: Which rows.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    return _columns(frame, Query(expressions, where))


def collect_groups(
    frame: Lazy,
    expressions: str,
    by: str,
    *,
    where: str = "",
    having: str = "",
    order: str = "",
    limit: int | None = None,
) -> list[tuple[Any, ...]]:
    """Aggregates in the same words, as `collect_expressions`.

    Args:
        frame: What is queried.
        expressions: What is selected, the columns that it is grouped ``by`` among it.
        by: What it is grouped by.
        where: Which rows; all by default.
        having: Which groups, by the names of what is selected; all by default.
        order: The names that they are sorted by.
        limit: How many groups at most.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    return _rows(frame, Query(expressions, where, by, having, order, limit))


def group_columns(frame: Lazy, expressions: str, by: str, *, where: str) -> Columns:
    """Aggregates in the same words, as `collect_groups`, for when there are many groups.

    Args:
        frame: What is queried.
        expressions: What is selected, the columns that it is grouped ``by`` among it.
        by: What it is grouped by.
        where: Which rows.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    return _columns(frame, Query(expressions, where, by))


def _rows(frame: Lazy, query: Query) -> list[tuple[Any, ...]]:
    native, engine = _asked(frame)
    with engine.reading():
        return engine.rows(native, query)


def _columns(frame: Lazy, query: Query) -> Columns:
    native, engine = _asked(frame)
    with engine.reading():
        return Columns(engine.arrays(native, query))


def _asked(frame: Lazy) -> tuple[Any, Engine]:
    """Returns the native object of a lazy frame, and the engine that knows it."""
    native = nw.to_native(frame)
    return native, engine_of(native)


R = TypeVar("R")


def remembered(*tables: Table) -> Callable[[Callable[[Run], R]], Callable[[Run], R]]:
    """Compute a result once for each open run and state of ``tables``."""

    def decorate(compute: Callable[[Run], R]) -> Callable[[Run], R]:
        known: WeakKeyDictionary[Run, tuple[Any, R]] = WeakKeyDictionary()

        @wraps(compute)
        def found(run: Run) -> R:
            state = tuple(run.stamp(table) for table in tables)
            if run not in known or known[run][0] != state:
                known[run] = state, compute(run)
            return known[run][1]

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
