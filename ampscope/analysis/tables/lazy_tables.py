"""One rank's tables as lazy frames, and their collection with errors that people understand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import duckdb
import narwhals as nw
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ampscope.analysis.numerics.arrays import Columns
from ampscope.errors import RunDamaged
from ampscope.trace.files.arrow_arrays import known_in, numbers_in
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table

Lazy = nw.LazyFrame[Any]


def first_rank(run: Run) -> int:
    """The lowest rank that has written; 0 when none has."""
    return min(run.ranks, default=0)


def rank_table(run: Run, table: Table, rank: int, *, step: int | None = None) -> Lazy:
    """The rows of ``table`` that ``rank`` wrote, all or those of one ``step``."""
    return run.table(table, step=step, rank=rank)


def collect(frame: Lazy) -> list[dict[str, Any]]:
    """Run the query and give its rows.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    with _reading():
        relation = nw.to_native(frame)
        return [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]


def collect_columns(frame: Lazy) -> Columns:
    """Run a query whose columns are numbers and truth values.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    with _reading():
        return Columns(nw.to_native(frame).fetchnumpy())


def stream_columns(frame: Lazy) -> Iterator[Columns]:
    """Run such a query and give its rows some at a time, in the order of the files where it has none of its own.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    with _reading():
        for batch in nw.to_native(frame).to_arrow_reader():
            yield Columns({name: _masked(batch[name]) for name in batch.schema.names})


def _masked(column: pa.Array) -> npt.NDArray[Any]:
    whole = pa.chunked_array([column])
    values = numbers_in(whole)
    return np.ma.masked_array(values, ~known_in(whole)) if column.null_count else values


def collect_expressions(
    frame: Lazy, expressions: str, *, where: str = "", order: str = "", limit: int | None = None
) -> list[tuple[Any, ...]]:
    """Run a query in the engine's own words, for what lazy frames have no words for, and give its rows.

    Args:
        frame: What is queried.
        expressions: What is selected.
        where: Which rows; all by default.
        order: The columns that it is sorted by.
        limit: How many rows at most.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    with _reading():
        relation = nw.to_native(frame)
        relation = relation.filter(where) if where else relation
        relation = relation.order(order) if order else relation
        relation = relation.limit(limit) if limit is not None else relation
        rows: list[tuple[Any, ...]] = relation.select(expressions).fetchall()
        return rows


def expression_columns(frame: Lazy, expressions: str, *, where: str) -> Columns:
    """What `collect_expressions` gives as arrays, for when there are many rows; one of a list holds arrays.

    Args:
        frame: What is queried.
        expressions: What is selected.
        where: Which rows.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    with _reading():
        return Columns(nw.to_native(frame).filter(where).select(expressions).fetchnumpy())


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
    """Aggregates in the engine's own words, as `collect_expressions`.

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
    with _reading():
        relation = nw.to_native(frame)
        relation = relation.filter(where) if where else relation
        relation = relation.aggregate(expressions, by)
        relation = relation.filter(having) if having else relation
        relation = relation.order(order) if order else relation
        rows: list[tuple[Any, ...]] = (relation.limit(limit) if limit is not None else relation).fetchall()
        return rows


def group_columns(frame: Lazy, expressions: str, by: str, *, where: str) -> Columns:
    """Aggregates in the engine's own words, as `collect_groups`, for when there are many groups.

    Args:
        frame: What is queried.
        expressions: What is selected, the columns that it is grouped ``by`` among it.
        by: What it is grouped by.
        where: Which rows.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    with _reading():
        return Columns(nw.to_native(frame).filter(where).aggregate(expressions, by).fetchnumpy())


#: DuckDB's errors that mean a mistake in the query, not in the file.
_OURS = (duckdb.BinderException, duckdb.CatalogException, duckdb.ParserException, duckdb.SyntaxException)


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except _OURS:
        raise
    except duckdb.Error as error:
        raise RunDamaged(
            f"A table of the run cannot be read: {error}. Restore the run from a copy, or move the damaged .parquet "
            "part out of its folder: the rest can be read without it."
        ) from error
