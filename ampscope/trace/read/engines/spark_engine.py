"""Queries over Spark's data frames, also those of Spark Connect; their answers come as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException, PySparkException

from ampscope.trace.files.arrow_arrays import known_in, numbers_in
from ampscope.trace.read.engines.duckdb_engine import unreadable_table
from ampscope.trace.read.engines.engine import Query
from ampscope.trace.read.engines.spark_sql import FRAME, spark_text

#: Errors that mean a mistake in the query, not in the file.
_OURS = (AnalysisException, ParseException)


class SparkEngine:
    """Asks the Spark session that a frame belongs to."""

    def rows(self, frame: Any, query: Query) -> list[tuple[Any, ...]]:
        """The answer as rows of Python values."""
        columns = [column.to_pylist() for column in _asked(frame, query).columns]
        return list(zip(*columns, strict=True))

    def arrays(self, frame: Any, query: Query) -> dict[str, npt.NDArray[Any]]:
        """The answer as arrays by name, masked where null; a list's column holds arrays."""
        found = _asked(frame, query)
        return dict(zip(found.column_names, map(_array, found.columns), strict=True))

    def batches(self, frame: Any) -> Iterator[pa.RecordBatch]:
        """The rows of a frame, some at a time."""
        yield from frame.toArrow().to_batches()

    def names(self, frame: Any) -> list[str]:
        """The columns of a frame, in order."""
        return list(frame.columns)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a query."""
        try:
            yield
        except _OURS:
            raise
        except PySparkException as error:
            raise unreadable_table(error) from error


def _asked(frame: Any, query: Query) -> pa.Table:
    if query == Query():
        return frame.toArrow()
    return frame.sparkSession.sql(spark_text(query), **{FRAME: frame}).toArrow()


def _array(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        values = numbers_in(column)
    else:
        given = column.to_pylist()
        values = np.empty(len(given), object)
        values[:] = [np.asarray(each) for each in given] if pa.types.is_list(kind) else given
    return np.ma.masked_array(values, ~known_in(column)) if column.null_count else values
