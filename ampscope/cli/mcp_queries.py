"""One SQL query over the tables of a run, bounded in time, memory and rows, that can only read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb

import ampscope
from ampscope.errors import AmpscopeError
from ampscope.report.json import as_plain
from ampscope.trace.location import location
from ampscope.trace.read.run import Run, open_run

#: What a query may take.
SECONDS = 20.0
MOST_ROWS = 1000
MOST_BYTES = 8 << 30
#: Characters of an answer as JSON.
MOST_CHARACTERS = 1_000_000
#: Seconds in which the process of a query begins and tells its answer.
_AROUND = 30.0
_AGAIN = 0.05  # seconds


def answer_apart(
    run: Path, query: str, *, rows: int, seconds: float = SECONDS, around: float = _AROUND
) -> dict[str, Any]:
    """`answer`, by a process of its own: some functions of SQL hear of no end while they compute.

    Args:
        run: See `answer`.
        query: See `answer`.
        rows: See `answer`.
        seconds: See `answer`.
        around: Seconds that the process may take besides; then it is killed.

    Raises:
        AmpscopeError: as `answer`; or the query ran out of memory.
    """
    home = str(Path(str(ampscope.__file__)).parent.parent)
    paths = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    asked = {"run": str(run), "query": query, "rows": rows, "seconds": seconds}
    try:
        told = subprocess.run(
            [sys.executable, "-P", "-c", f"from {__name__} import main; main()"],
            input=json.dumps(asked).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            timeout=seconds + around,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired:
        raise AmpscopeError(_too_long(seconds)) from None
    found = json.loads(told) if told else {"error": "the query ran out of memory; ask for fewer rows"}
    if "error" in found:
        raise AmpscopeError(found["error"])
    return dict(found)


def main() -> None:
    """The process of a query: takes it from standard input, and prints its answer."""
    asked = json.load(sys.stdin)
    with suppress(ImportError, ValueError, OSError):  # not on every system, or less is allowed already
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    try:
        found = answer(location(asked["run"]), asked["query"], rows=asked["rows"], seconds=asked["seconds"])
    except AmpscopeError as error:
        found = {"error": str(error)}
    sys.stdout.write(json.dumps(found))


def answer(run: Path, query: str, *, rows: int, seconds: float = SECONDS) -> dict[str, Any]:
    """The first rows of a query.

    Args:
        run: The run's folder.
        query: One SELECT, in DuckDB's dialect, over the tables by their names.
        rows: How many rows at most.
        seconds: After which it is given up.

    Returns:
        ``columns``, ``rows`` (lists, numbers that JSON lacks as strings) and ``more``: whether there are further ones.

    Raises:
        AmpscopeError: it is no query, is wrong, takes too long, or has too long an answer.
    """
    _check(query)
    with open_run(run) as opened:
        try:
            over = threading.Event()
            threading.Thread(target=_interrupt, args=(opened, seconds, over), daemon=True).start()
            try:
                relation = opened.sql(query)
                found = relation.limit(rows + 1).fetchall()
            finally:
                over.set()
        except duckdb.InterruptException:
            raise AmpscopeError(_too_long(seconds)) from None
        except duckdb.Error as error:
            raise AmpscopeError(f"the query is wrong: {error}") from None
        told = {"columns": relation.columns, "rows": [_row(each) for each in found[:rows]], "more": len(found) > rows}
    if (size := len(json.dumps(told))) > MOST_CHARACTERS:
        raise AmpscopeError(
            f"the answer has {size:,} characters, of {MOST_CHARACTERS:,}; ask for fewer rows or columns"
        )
    return told


def _interrupt(run: Run, seconds: float, over: threading.Event) -> None:
    """Ends what runs after some seconds; again and again, for it is not heard between two queries."""
    if not over.wait(seconds):
        while not over.wait(_AGAIN):
            with suppress(duckdb.Error):  # it may just have been closed
                run.interrupt()


def _too_long(seconds: float) -> str:
    return f"the query took longer than {seconds:g} s; ask for fewer steps or ranks"


def _check(query: str) -> None:
    try:
        statements = duckdb.extract_statements(query)
    except duckdb.Error as error:
        raise AmpscopeError(f"the query is wrong: {error}") from None
    if len(statements) != 1 or statements[0].type is not duckdb.StatementType.SELECT:
        raise AmpscopeError("one SELECT can be asked; a run is only read")


def _row(values: tuple[Any, ...]) -> list[Any]:
    return [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    plain = as_plain(value)
    return plain if isinstance(plain, (str, int, float, bool, list, dict, type(None))) else str(plain)
