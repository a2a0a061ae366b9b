"""The tables of a `Run` are asked for by an engine, as frames or as rows, and columns become rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from enum import StrEnum
from typing import Any, Protocol

import duckdb
import narwhals as nw
import pyarrow as pa

from ampscope.errors import EngineError, RunDamaged
from ampscope.trace.read.duckdb_engine import DuckDBEngine, Engine, Pieces
from ampscope.trace.read.part_columns import has_null_elements
from ampscope.trace.schema import SiteRow, Table, rows_of

#: Sizes of a tensor as they are written; nothing for a scalar.
_SHAPE = re.compile(r"(?:[0-9]{1,19}(?:x[0-9]{1,19})*)?", re.ASCII)
#: The order in which `Run.rows` gives rows, after the rank.
ORDER: dict[Table, tuple[str, ...]] = {
    Table.STEPS: ("step", "optimizer"),
    Table.SCALER_EVENTS: ("time", "step", "scaler"),
    Table.PARAMS: ("param",),
    Table.GRADS: ("step", "optimizer", "param"),
    Table.SITES: ("site",),
    Table.OPS: ("step", "source", "seq", "out"),
    Table.EDGES: ("step", "source", "seq", "arg"),
    Table.INCIDENTS: ("step", "optimizer", "time"),
    Table.REPLAYS: ("step", "optimizer", "time"),
    Table.AUDITS: ("step", "optimizer", "time"),
    Table.AUDIT_OPS: ("step", "source", "seq", "out"),
    Table.FINDINGS: ("step", "time"),
    Table.EVENTS: ("time", "step"),
}


class TableFrames:
    """The tables of a run by their names; many methods because there is one for each."""

    def table(self, table: Table) -> nw.LazyFrame[Any]:
        """The rows of a table."""
        raise NotImplementedError

    @property
    def steps(self) -> nw.LazyFrame[Any]:
        """One row per optimizer step attempt."""
        return self.table(Table.STEPS)

    @property
    def scaler_events(self) -> nw.LazyFrame[Any]:
        """Changes of and calls to gradient scalers."""
        return self.table(Table.SCALER_EVENTS)

    @property
    def params(self) -> nw.LazyFrame[Any]:
        """Parameters and buffers."""
        return self.table(Table.PARAMS)

    @property
    def grads(self) -> nw.LazyFrame[Any]:
        """Gradients of parameters by step."""
        return self.table(Table.GRADS)

    @property
    def sites(self) -> nw.LazyFrame[Any]:
        """Program points."""
        return self.table(Table.SITES)

    @property
    def ops(self) -> nw.LazyFrame[Any]:
        """Executed ops of traced steps with their statistics."""
        return self.table(Table.OPS)

    @property
    def edges(self) -> nw.LazyFrame[Any]:
        """Dataflow of traced steps."""
        return self.table(Table.EDGES)

    @property
    def incidents(self) -> nw.LazyFrame[Any]:
        """Steps that went wrong."""
        return self.table(Table.INCIDENTS)

    @property
    def replays(self) -> nw.LazyFrame[Any]:
        """Counterfactual replays: what was changed and what came out."""
        return self.table(Table.REPLAYS)

    @property
    def audits(self) -> nw.LazyFrame[Any]:
        """Audits of healthy steps: what their ops lose by their dtypes."""
        return self.table(Table.AUDITS)

    @property
    def audit_ops(self) -> nw.LazyFrame[Any]:
        """The ops of audited steps with their errors."""
        return self.table(Table.AUDIT_OPS)

    @property
    def findings(self) -> nw.LazyFrame[Any]:
        """Evidence of usage mistakes."""
        return self.table(Table.FINDINGS)

    @property
    def events(self) -> nw.LazyFrame[Any]:
        """Annotations on the time line."""
        return self.table(Table.EVENTS)


def is_equal(name: str, value: object) -> duckdb.Expression:
    """Returns the condition that a column equals ``value``, or is null for None."""
    column = duckdb.ColumnExpression(name)
    if value is None:
        return column.isnull()
    return column == duckdb.ConstantExpression(str(value) if isinstance(value, StrEnum) else value)


def rows_from(table: Table, columns: Sequence[pa.ChunkedArray]) -> list[Any]:
    """The rows of a table, of its columns in the order of the schema.

    Raises:
        RunDamaged: they are none that AMPscope writes.
    """
    rows = rows_of(table, list(map(_values_of, columns)))
    if table is Table.SITES and not _are_whole(rows):
        raise RunDamaged(
            "A program point of the run has shapes that are none, or not one for each dtype: restore it from a copy."
        )
    return rows


def _are_whole(sites: Sequence[SiteRow]) -> bool:
    if any(len(one.in_dtypes) != len(one.in_shapes) or len(one.out_dtypes) != len(one.out_shapes) for one in sites):
        return False
    shapes = {shape for site in sites for shape in (*site.in_shapes, *site.out_shapes)}
    return all(map(_SHAPE.fullmatch, shapes))


def _values_of(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column, lists as tuples.

    Raises:
        RunDamaged: a list holds a null.
    """
    values: list[Any] = column.to_pylist()
    if pa.types.is_list(column.type) and has_null_elements(column):
        raise RunDamaged("A table of the run holds lists with nulls, which no AMPscope writes: restore it from a copy.")
    if pa.types.is_list(column.type):  # the row types hold tuples
        return [None if value is None else tuple(value) for value in values]
    return values


#: ``"duckdb"``, ``"spark"``, the address of a Spark Connect server, or a Spark session.
Chosen = Any
_SPARK, _DUCKDB = "spark", DuckDBEngine()


class TableEngine(Protocol):
    """An engine that makes frames of a run's files by itself."""

    def frame(self, key: Hashable, table: Table, pieces: Callable[[], Pieces]) -> Any:
        """The rows of a table, with the columns of what is loaded of it; the same for the same ``key``."""

    def close(self) -> None:
        """Let go of what was started for it."""


def chosen_engine(asked: Chosen) -> TableEngine | None:
    """Returns the engine that makes the frames of a run; None for DuckDB, which every run has.

    Raises:
        EngineError: there is no such engine, or it is not installed, or it cannot be started.
    """
    if asked == "duckdb":
        return None
    if isinstance(asked, str) and asked != _SPARK and not asked.startswith("sc://"):
        raise EngineError(f"There is no engine {asked!r}: give duckdb, spark, or sc://host:port for Spark Connect.")
    try:
        from ampscope.trace.read.spark import SparkTables
    except ImportError as error:
        raise EngineError(f"Spark is not installed ({error}): pip install 'ampscope[spark]'.") from error
    return SparkTables(asked)


def engine_of(frame: Any) -> Engine:
    """The engine that a frame belongs to."""
    if type(frame).__module__.partition(".")[0].endswith("duckdb"):
        return _DUCKDB
    from ampscope.trace.read.spark import SparkEngine

    return SparkEngine()
