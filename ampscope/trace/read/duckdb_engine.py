"""An engine is asked in DuckDB's SQL; DuckDB itself, which every reader has, sees the one run and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import duckdb
import numpy.typing as npt
import pyarrow as pa

from ampscope.errors import RunDamaged
from ampscope.trace.location import BucketPath


class Query(NamedTuple):
    """A query over a frame."""

    select: str = "*"
    where: str = ""  #: which rows; all by default
    by: str = ""  #: what they are grouped by; not at all by default
    having: str = ""  #: which groups, by the names of what is selected
    order: str = ""  #: what it is sorted by; of groups the names of what is selected
    limit: int | None = None  #: how many rows at most


class Pieces(NamedTuple):
    """The pieces that make up a table, or a part of it, at one moment."""

    sealed: dict[tuple[str, ...], list[Path]]  #: parts, by their columns: those of today's schema or some of them
    loaded: pa.Table  #: all other rows, of journals and of older versions, with the columns that the frame shall have

    @property
    def parts(self) -> list[Path]:
        """All sealed parts."""
        return [part for parts in self.sealed.values() for part in parts]


class Engine(Protocol):
    """Answers queries over its own kind of frame; every answer is the same whichever engine gives it."""

    def rows(self, frame: Any, query: Query) -> list[tuple[Any, ...]]:
        """The answer as rows of Python values."""

    def arrays(self, frame: Any, query: Query) -> dict[str, npt.NDArray[Any]]:
        """The answer as arrays by name, masked where null; a list's column holds arrays."""

    def batches(self, frame: Any) -> Iterator[pa.RecordBatch]:
        """The rows of a frame, some at a time."""

    def names(self, frame: Any) -> list[str]:
        """The columns of a frame, in order."""

    def reading(self) -> AbstractContextManager[None]:
        """Around a query.

        Raises:
            RunDamaged: a part cannot be read; mistakes in the query raise as they are.
        """


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


#: What the queries on a run may take in memory; a group of fifty million rows takes a tenth of it.
MEMORY = "4GiB"

#: Bytes between two columns of a file in a store that are fetched with them sooner than in a request of their own.
_GAP = 64 << 10


def sealed_off(*runs: Path) -> duckdb.DuckDBPyConnection:
    """A database that reads these runs' folders and nothing else, and loads no extension."""
    database = duckdb.connect(
        ":memory:",
        config={
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
            "memory_limit": MEMORY,
            "temp_directory": "",  # a reader writes nothing
        },
    )
    for stored in _by_store(runs):
        from ampscope.trace.read.database_files import RunFiles  # loads fsspec

        database.register_filesystem(RunFiles(stored))
        database.execute(f"SET parquet_prefetch_column_gap = {_GAP}")
        database.execute("SET enable_external_file_cache = false")  # it rounds reads out; what was read is kept
    folders = ", ".join("'" + str(run).replace("'", "''") + "'" for run in runs)
    database.execute(f"SET allowed_directories = [{folders}]")
    database.execute("SET parquet_metadata_cache = true")
    database.execute("SET enable_external_access = false")
    database.execute("SET lock_configuration = true")
    return database


def _by_store(runs: Iterable[Path]) -> Iterable[list[BucketPath]]:
    """Groups the runs that lie in object stores by the kind of store."""
    found: dict[str, list[BucketPath]] = {}
    for run in runs:
        if isinstance(run, BucketPath):
            found.setdefault(run.scheme, []).append(run)
    return found.values()
