"""Queries over DuckDB's relations: the engine that every reader has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import duckdb
import numpy.typing as npt
import pyarrow as pa

from ampscope.errors import RunDamaged
from ampscope.trace.read.engines.engine import Query

#: Errors that mean a mistake in the query, not in the file.
_OURS = (duckdb.BinderException, duckdb.CatalogException, duckdb.ParserException, duckdb.SyntaxException)


class DuckDBEngine:
    """Asks DuckDB, in this process."""

    def rows(self, frame: duckdb.DuckDBPyRelation, query: Query) -> list[tuple[Any, ...]]:
        """The answer as rows of Python values."""
        found: list[tuple[Any, ...]] = _asked(frame, query).fetchall()
        return found

    def arrays(self, frame: duckdb.DuckDBPyRelation, query: Query) -> dict[str, npt.NDArray[Any]]:
        """The answer as arrays by name, masked where null; a list's column holds arrays."""
        found: dict[str, npt.NDArray[Any]] = _asked(frame, query).fetchnumpy()
        return found

    def batches(self, frame: duckdb.DuckDBPyRelation) -> Iterator[pa.RecordBatch]:
        """The rows of a frame, some at a time."""
        yield from frame.to_arrow_reader()

    def names(self, frame: duckdb.DuckDBPyRelation) -> list[str]:
        """The columns of a frame, in order."""
        return list(frame.columns)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a query."""
        try:
            yield
        except _OURS:
            raise
        except duckdb.Error as error:
            raise unreadable_table(error) from error


def unreadable_table(error: Exception) -> RunDamaged:
    """Makes the error to raise for a query that failed because of the files."""
    return RunDamaged(
        f"A table of the run cannot be read: {error}. Restore the run from a copy, or move the damaged .parquet "
        "part out of its folder: the rest can be read without it."
    )


def _asked(frame: duckdb.DuckDBPyRelation, query: Query) -> duckdb.DuckDBPyRelation:
    found = frame.filter(query.where) if query.where else frame
    if query.by:
        found = found.aggregate(query.select, query.by)
        found = found.filter(query.having) if query.having else found
    found = found.order(query.order) if query.order else found
    found = found.limit(query.limit) if query.limit is not None else found
    return found if query.by or query.select == "*" else found.select(query.select)
