"""A unified diff applied to the file that it was made of: each line where it stood, or not at all."""

from __future__ import annotations

import re
from typing import NamedTuple

from ampscope.analysis.cures.rewriting.source_file import SourceFile

_FILE = re.compile(r"--- a/(?P<file>.+)\n\+\+\+ b/(?P=file)\n")
_ROWS = re.compile(r"[^\n]*\n|[^\n]+")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


class Hunk(NamedTuple):
    """A part of a diff."""

    first: int  #: the number of its first line in the old file, from 1; of an empty part the one before it
    rows: list[str]  #: with the sign that they begin with, and their ends


def file_of(diff: str) -> str:
    """The file that a diff changes, as it names it; empty for what is no diff of one file."""
    match = _FILE.match(diff)
    return match["file"] if match else ""


def first_line(diff: str) -> int:
    """The number of the first line that a diff changes."""
    for hunk in _hunks(diff)[:1]:
        return hunk.first + next((at for at, row in enumerate(hunk.rows) if row[0] != " "), 0)
    return 0


def applied(diff: str, source: SourceFile) -> str | None:
    """A file with a diff applied; None where a line of it reads otherwise than the diff says."""
    lines, hunks = list(source.lines), _hunks(diff)
    for hunk in reversed(hunks):
        old = [row[1:] for row in hunk.rows if row[0] in " -"]
        new = [row[1:] for row in hunk.rows if row[0] in " +"]
        start = hunk.first - 1 if old else hunk.first
        if start < 0 or not old or lines[start : start + len(old)] != old:
            return None
        lines[start : start + len(old)] = new
    return "".join(lines) if hunks else None


def _hunks(diff: str) -> list[Hunk]:
    found: list[Hunk] = []
    head = _FILE.match(diff)
    for row in _ROWS.findall(diff, head.end()) if head else ():
        match = _HUNK.match(row)
        if match:
            found.append(Hunk(int(match[1]), []))
        elif row.startswith("\\") and found:
            found[-1].rows[-1] = found[-1].rows[-1].removesuffix("\n")
        elif found:
            found[-1].rows.append(row)
    return found
