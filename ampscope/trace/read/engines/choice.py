"""Chooses the engine that queries a run's tables; Spark is loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from ampscope.errors import EngineError
from ampscope.trace.read.engines.duckdb_engine import DuckDBEngine
from ampscope.trace.read.engines.engine import Engine, Pieces
from ampscope.trace.schema import Table

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
        from ampscope.trace.read.engines.spark_tables import SparkTables
    except ImportError as error:
        raise EngineError(f"Spark is not installed ({error}): pip install 'ampscope[spark]'.") from error
    return SparkTables(asked)


def engine_of(frame: Any) -> Engine:
    """The engine that a frame belongs to."""
    if type(frame).__module__.partition(".")[0].endswith("duckdb"):
        return _DUCKDB
    from ampscope.trace.read.engines.spark_engine import SparkEngine

    return SparkEngine()
