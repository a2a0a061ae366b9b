"""The database that a run's tables are queried with: it sees that run and nothing else."""

from __future__ import annotations

from pathlib import Path

import duckdb

#: What the queries on a run may take in memory; a group of fifty million rows takes a tenth of it.
MEMORY = "4GiB"


def sealed_off(path: Path) -> duckdb.DuckDBPyConnection:
    """A database that reads the run's folder and nothing else, and loads no extension."""
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
    folder = str(path).replace("'", "''")
    database.execute(f"SET allowed_directories = ['{folder}']")
    database.execute("SET parquet_metadata_cache = true")
    database.execute("SET enable_external_access = false")
    database.execute("SET lock_configuration = true")
    return database
