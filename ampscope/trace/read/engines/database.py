"""The database that a run's tables are queried with: it sees that run and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import duckdb

from ampscope.trace.remote.location import BucketPath

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
        from ampscope.trace.remote.database_files import RunFiles  # loads fsspec

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
