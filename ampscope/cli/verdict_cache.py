"""Verdicts that are kept in the user's cache folder: a run of a fleet is diagnosed once for each of its states."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from pathlib import Path

import ampscope
from ampscope.analysis.diagnosis.fleet_results import RunVerdict, ToldCause
from ampscope.trace.read.table_scan import Scan
from ampscope.trace.schema import MANIFEST, Table
from ampscope.trace.vocabulary import Cause, Severity


class VerdictCache:
    """Remembers verdicts by run, state of its files and version of AMPscope; used by one thread.

    A cache that cannot be written, or holds what it should not, is as good as none.

    Args:
        file: Where it lies; by default below ``XDG_CACHE_HOME``.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file or _folder() / "verdicts.sqlite"
        self._database = self._opened()

    def get(self, run: Path) -> RunVerdict | None:
        """The verdict on a run as it is now; None where it is not known."""
        if self._database is None:
            return None
        query = "SELECT verdict FROM verdicts WHERE run = ? AND state = ?"
        try:
            row = self._database.execute(query, (str(run), _state(run))).fetchone()
            return _read(row[0]) if row is not None else None
        except (sqlite3.Error, OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, run: Path, verdict: RunVerdict) -> None:
        """Remember it in the place of an older one."""
        if self._database is None:
            return
        told = [[each.cause, each.severity, each.op, each.module, each.line, each.count] for each in verdict.told]
        text = json.dumps({"verdict": verdict.verdict, "primary": verdict.primary, "told": told})
        try:
            with self._database:
                self._database.execute(
                    "INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?)", (str(run), _state(run), text)
                )
        except (sqlite3.Error, OSError):
            self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._database is not None:
            self._database.close()
        self._database = None

    def _opened(self) -> sqlite3.Connection | None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self._file)
            database.execute("CREATE TABLE IF NOT EXISTS verdicts (run TEXT PRIMARY KEY, state TEXT, verdict TEXT)")
        except (sqlite3.Error, OSError):
            return None
        return database


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "ampscope"


def _state(run: Path) -> str:
    """Returns a hash that changes when the run, or this AMPscope, does."""
    scan, manifest = Scan(run), (run / MANIFEST).stat()
    stamps = [scan.stamp(table) for table in Table]
    told = repr((ampscope.__version__, manifest.st_size, manifest.st_mtime_ns, stamps))
    return hashlib.sha256(told.encode()).hexdigest()


def _read(text: str) -> RunVerdict:
    kept = json.loads(text)
    told = tuple(
        ToldCause(cause=Cause(cause), severity=Severity(severity), op=op, module=module, line=line, count=count)
        for cause, severity, op, module, line, count in kept["told"]
    )
    primary = Cause(kept["primary"]) if kept["primary"] is not None else None
    return RunVerdict(verdict=kept["verdict"], primary=primary, told=told)
