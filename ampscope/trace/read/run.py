"""The reading side of a trace: a run's tables as lazy frames over DuckDB, also while it is still being written."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Collection, Sequence
from functools import reduce
from itertools import starmap
from operator import and_
from pathlib import Path
from typing import Any, Literal, cast, overload

import duckdb
import narwhals as nw

from ampscope.errors import RunDamaged
from ampscope.notebook_repr import NotebookRepr
from ampscope.trace.files.folder_lock import is_locked
from ampscope.trace.files.layout import rank_folder, ranks
from ampscope.trace.files.parquet_part import ExecutionRows
from ampscope.trace.location import BucketPath, location
from ampscope.trace.manifest import Manifest, read_manifest
from ampscope.trace.read.duckdb_engine import sealed_off
from ampscope.trace.read.find import find_runs, locate
from ampscope.trace.read.part_columns import RANK
from ampscope.trace.read.small_tables import SmallTables
from ampscope.trace.read.table_folders import Stamp
from ampscope.trace.read.table_queries import ORDER, Chosen, TableFrames, chosen_engine, is_equal, rows_from
from ampscope.trace.read.table_scan import OfRanks, Scan
from ampscope.trace.schema import (
    GROWING_TABLES,
    AuditOpRow,
    AuditRow,
    EdgeRow,
    EventRow,
    FindingRow,
    GradRow,
    IncidentRow,
    OpRow,
    ParamRow,
    ReplayRow,
    Row,
    ScalerEventRow,
    SiteRow,
    StepRow,
    Table,
    arrow_schema,
)

Status = Literal["open", "closed", "interrupted"]

#: Seconds without a new row after which a run on a file system without locks counts as interrupted.
_SILENCE_S = 120.0


def status_of(run: Path, manifest: Manifest) -> Status:
    """``open`` while a process writes the run, ``closed`` after, ``interrupted`` when it died before closing."""
    if manifest.closed is not None:
        return "closed"
    if not manifest.segments:  # written by other ranks alone
        return "open" if any(is_locked(rank_folder(run, rank)) for rank in ranks(run)) else "interrupted"
    if isinstance(run, BucketPath) or all(segment.locked for segment in manifest.segments[-1:]):
        return "open" if is_locked(rank_folder(run, 0)) else "interrupted"
    return "open" if time.time() - _last_change(run) < _SILENCE_S else "interrupted"


def _last_change(run: Path) -> float:
    return max((path.lstat().st_mtime for path in run.glob("rank=*/*/*")), default=0.0)


__all__ = ["Run", "find_runs", "open_run"]


def open_run(path: str | os.PathLike[str], *, engine: Chosen = "duckdb") -> Run:
    """Open the run in ``path``, or the only run below it; a URL (``s3://bucket/prefix``) is read where it lies.

    Args:
        path: Where it is.
        engine: What its tables are queried with: ``"duckdb"``, in this process; ``"spark"``, a session that is there
            already or one that is started, and stopped when the run is closed; the address of a Spark Connect server,
            ``"sc://host:port"``; or a Spark session, which stays. Spark reads the run's files itself, so they must
            lie where its workers find them.

    Raises:
        EngineError: the engine is unknown or cannot be had.
        RunNotFound: there is none there, or several.
        RunDamaged: its manifest cannot be read.
        RunTooNew: it was written with a newer schema.
        RunUnreachable: it lies in an object store that cannot be used, or does not answer.
    """
    return Run(locate(location(path)), engine=engine)


class Run(TableFrames, NotebookRepr):
    """A run that is read. Usable from several threads; what it keeps is footers of sealed parts and journaled rows.

    Each access to a table looks at the folder anew, so that it sees the rows written since, of which it reads no more
    than those. A frame that was taken keeps showing the rows of its own moment. Rows in Parquet stay on the disk until
    a query needs them. With another engine than DuckDB the frames of tables that grow with the training are that
    engine's; what is small, one step among it, comes by DuckDB from the same files. It has many methods because it is
    the one door to a trace.
    """

    def __init__(self, path: Path, *, engine: Chosen = "duckdb") -> None:
        self.path = path.resolve()
        read_manifest(self.path)
        self._engine = chosen_engine(engine)
        self._database = sealed_off(self.path)
        self._scan = Scan(self.path)
        self._small = SmallTables(self._scan)
        self._local = threading.local()
        # Of each thread; no weak set, whose callback in Python would swallow what a signal handler raises in it.
        self._connections: set[weakref.ref[duckdb.DuckDBPyConnection]] = set()
        self._lock = threading.Lock()

    @property
    def manifest(self) -> Manifest:
        """The manifest as it is on the disk now."""
        return read_manifest(self.path)

    @property
    def status(self) -> Status:
        """``open`` while a process writes the run, ``closed`` after, ``interrupted`` when it died before closing."""
        return status_of(self.path, self.manifest)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have written into the run."""
        return ranks(self.path)

    def table(
        self, table: Table, *, step: int | Collection[int] | None = None, rank: OfRanks = None
    ) -> nw.LazyFrame[Any]:
        """The rows of a table, as of now, with the writing ``rank`` as last column (int32).

        Args:
            table: The table.
            step: Only the rows of this step, or of these: of a large table their files alone are looked at.
            rank: Only the rows of this rank, or of these, whose files alone are looked at; by default those of all.

        Raises:
            RunDamaged: a Parquet part cannot be read.
        """
        steps = None if step is None else sorted({step} if isinstance(step, int) else set(step))
        frame: nw.LazyFrame[Any] = nw.from_native(self._frame(table, steps, rank))
        return frame if steps is None else frame.filter(nw.col("step").is_in(steps))

    def stamp(self, table: Table, *, rank: OfRanks = None) -> Stamp:
        """Returns a stamp of a table, or of one rank's, that is the same as long as no row is added."""
        return self._scan.stamp(table, rank)

    @overload
    def rows(self, table: Literal[Table.STEPS], **equals: object) -> list[StepRow]: ...
    @overload
    def rows(self, table: Literal[Table.SCALER_EVENTS], **equals: object) -> list[ScalerEventRow]: ...
    @overload
    def rows(self, table: Literal[Table.PARAMS], **equals: object) -> list[ParamRow]: ...
    @overload
    def rows(self, table: Literal[Table.GRADS], **equals: object) -> list[GradRow]: ...
    @overload
    def rows(self, table: Literal[Table.SITES], **equals: object) -> list[SiteRow]: ...
    @overload
    def rows(self, table: Literal[Table.OPS], **equals: object) -> list[OpRow]: ...
    @overload
    def rows(self, table: Literal[Table.EDGES], **equals: object) -> list[EdgeRow]: ...
    @overload
    def rows(self, table: Literal[Table.INCIDENTS], **equals: object) -> list[IncidentRow]: ...
    @overload
    def rows(self, table: Literal[Table.REPLAYS], **equals: object) -> list[ReplayRow]: ...
    @overload
    def rows(self, table: Literal[Table.AUDITS], **equals: object) -> list[AuditRow]: ...
    @overload
    def rows(self, table: Literal[Table.AUDIT_OPS], **equals: object) -> list[AuditOpRow]: ...
    @overload
    def rows(self, table: Literal[Table.FINDINGS], **equals: object) -> list[FindingRow]: ...
    @overload
    def rows(self, table: Literal[Table.EVENTS], **equals: object) -> list[EventRow]: ...
    @overload
    def rows(self, table: Table, **equals: object) -> Sequence[Row]: ...

    def rows(self, table: Table, **equals: object) -> Any:
        """The rows whose columns equal what is given (None: are null), loaded, by rank and then in natural order.

        ``run.rows(Table.OPS, step=3, source="replay")``; ``rank=0`` works too.

        Raises:
            RunDamaged: a Parquet part cannot be read.
        """
        try:
            return self._load(table, equals)
        except (duckdb.InterruptException, duckdb.BinderException):
            raise
        except duckdb.Error:
            self._scan.verify(table)
        try:
            return self._load(table, equals)  # the disk budget deleted a part between looking and reading
        except duckdb.Error as error:
            raise RunDamaged(f"The {table.value} of {self.path} cannot be read: {error}.") from error

    def traced(self, rank: int) -> list[ExecutionRows]:
        """How many rows there are of each step that a rank has traced, in no order, without reading them.

        Raises:
            RunDamaged: a Parquet part cannot be read.
        """
        try:
            return self._scan.traced(self._connection, rank)
        except duckdb.Error:
            self._scan.verify(Table.OPS)
        try:
            return self._scan.traced(self._connection, rank)  # the disk budget deleted a part meanwhile
        except duckdb.Error as error:
            raise RunDamaged(f"The ops of {self.path} cannot be read: {error}.") from error

    def verify(self) -> None:
        """Read every sealed part; for when a query over a frame fails with a `duckdb.Error`.

        Raises:
            RunDamaged: a Parquet part cannot be read; the message names it.
        """
        for table in Table:
            self._scan.verify(table)

    def sql(self, query: str) -> duckdb.DuckDBPyRelation:
        """A query over the tables by their names (``steps``, ``ops``, ...), as of now.

        Nothing outside the run's folder can be read from it.

        Raises:
            duckdb.Error: the query is wrong.
            RunDamaged: a Parquet part cannot be read.
        """
        with self._lock:  # views belong to the database, not to this thread's connection
            for table in Table:
                self._relation(table).create_view(table.value, replace=True)
            return self._connection.sql(query)

    def interrupt(self) -> None:
        """End the queries that any thread has running here; they raise `duckdb.InterruptException`."""
        for connection in self._open_connections():
            connection.interrupt()

    def close(self) -> None:
        """Give the memory back, and end what was started; frames that were taken are void."""
        if self._engine is not None:
            self._engine.close()
        for connection in self._open_connections():
            connection.close()

    def _open_connections(self) -> list[duckdb.DuckDBPyConnection]:
        """Lists the connections of the threads that live, the database's own last."""
        found = [known() for known in tuple(self._connections)]
        return [*(connection for connection in found if connection is not None), self._database]

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def _connection(self) -> duckdb.DuckDBPyConnection:
        """Returns this thread's connection: one answers a single query at a time."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._database.cursor()
            self._connections.difference_update([known for known in tuple(self._connections) if known() is None])
            self._connections.add(weakref.ref(connection))
            self._local.relations = {}
        return cast(duckdb.DuckDBPyConnection, connection)

    def _load(self, table: Table, equals: dict[str, object]) -> list[Any]:
        step, rank = (found if isinstance(found := equals.get(name), int) else None for name in ("step", RANK))
        if (RANK in equals) == (rank is not None):
            others = {name: value for name, value in equals.items() if name != RANK}
            small = self._small.get(self._connection, table, rank, self._scan.stamp(table, rank))
            if small is not None and (rows := small.rows(others)) is not None:
                return rows
        relation = self._relation(table, None if step is None else (step,), rank)
        if equals:
            relation = relation.filter(reduce(and_, starmap(is_equal, equals.items())))
        relation = relation.order(", ".join(("rank", *ORDER[table])))
        columns = relation.select(*map(duckdb.ColumnExpression, arrow_schema(table).names)).to_arrow_table().columns
        return rows_from(table, columns)

    def _frame(self, table: Table, steps: Sequence[int] | None, rank: OfRanks) -> Any:
        """The table as it is now; what does not grow with the training, and some steps, come by DuckDB always."""
        if self._engine is None or steps is not None or table not in GROWING_TABLES:
            return self._relation(table, steps, rank)
        key = table, rank, self._scan.stamp(table, rank)
        return self._engine.frame(key, table, lambda: self._scan.pieces(table, rank=rank))

    def _relation(
        self, table: Table, steps: Sequence[int] | None = None, rank: OfRanks = None
    ) -> duckdb.DuckDBPyRelation:
        """The table as it is now; binding hundreds of parts takes a while, so the same state is bound once a thread."""
        connection, stamp = self._connection, self._scan.stamp(table, rank)
        known = self._local.relations.get((table, rank))
        if known is not None and known[0] == stamp and steps is None:
            return cast(duckdb.DuckDBPyRelation, known[1])
        if (small := self._small.get(connection, table, rank, stamp)) is not None:
            return connection.from_arrow(small.arrow)  # not kept here: it would keep its rows
        if steps is not None:
            return self._scan.relation(connection, table, steps=steps, rank=rank)
        known = self._local.relations[table, rank] = stamp, self._scan.relation(connection, table, rank=rank)
        return known[1]
