"""A full journal becomes an immutable Parquet part, and small neighbouring parts become one.

A part that holds the rows of others stands in their place from the instant it has its name; they are deleted some time
later, when nobody who has listed them before is still about to read them. A writer that dies in between leaves them to
the next one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ampscope.trace.files.journal import read_journal
from ampscope.trace.files.layout import TEMPORARY_SUFFIX, Span, list_table, part_path, span_of, span_path
from ampscope.trace.files.parquet_part import write_part
from ampscope.trace.files.whole_files import open_regular, remove, write_whole
from ampscope.trace.schema import Table, arrow_schema
from ampscope.trace.write.thinning import fitting, thinned


def seal(journal: Path) -> Path | None:
    """Turn a journal that nobody appends to any more into the Parquet part of the same number.

    Until the part has its name the journal counts, from then on the part; only then is the journal deleted.

    Returns:
        The part, or None when the journal held no whole row.

    Raises:
        OSError: the disk is full or gone; the journal is still there.
    """
    rows = read_journal(journal)
    part = part_path(journal) if rows.num_rows else None
    if part is not None:
        write_whole(part, lambda path: write_part(rows, path))
    remove(journal)
    return part


def sweep(folder: Path) -> list[Path]:
    """Clear what a dead writer left in a table's folder and return its unsealed journals, oldest first.

    Raises:
        OSError: the folder cannot be changed.
    """
    listing = list_table(folder)
    for held in (*listing.sealed_journals, *listing.superseded):
        remove(held)
    for temporary in folder.glob("*" + TEMPORARY_SUFFIX):
        remove(temporary)
    return listing.open_journals


#: Parts that become one.
FAN_IN = 8
#: Rows and bytes that a merged part has at most.
MOST_ROWS = 300_000
MOST_BYTES = 16 << 20
#: Seconds after which nobody is about to read a part that is listed no more.
AGE_S = 60.0


def merge(folder: Path, table: Table, *, most_bytes: int = MOST_BYTES) -> Path | None:
    """Make one part of the first neighbours that are small enough.

    Returns:
        The new part; None where there is nothing to merge.

    Raises:
        OSError: the folder cannot be changed.
    """
    chosen = _neighbours(table, [path for _, path in sorted(list_table(folder).parts.items())], most_bytes)
    read = [_rows(part, table) for part in chosen]
    rows = [each for each in read if each is not None]
    if not rows or len(rows) < len(chosen):
        return None
    spans = [span_of(part) for part in chosen]
    span = Span(spans[0].first, spans[-1].last, min(span.level for span in spans))
    return _write(folder, span, pa.concat_tables(rows))


def thin(part: Path, table: Table) -> Path | None:
    """Thin a part by one level; it stays beside the new one until it is deleted.

    Returns:
        The new part; None where the old one is of another version, or damaged.

    Raises:
        OSError: the folder cannot be changed.
    """
    span, rows = span_of(part), _rows(part, table)
    if rows is None:
        return None
    return _write(part.parent, span._replace(level=span.level + 1), thinned(table, rows, span.level + 1))


class Leftovers:
    """Parts whose rows another part holds by now, until nobody is about to read them any more."""

    def __init__(self) -> None:
        self._since: dict[Path, float] = {}

    def look(self, folder: Path) -> None:
        """Take down what is left in a table's folder."""
        for part in list_table(folder).superseded:
            self._since.setdefault(part, time.monotonic())

    def clear(self, *, age: float = AGE_S) -> None:
        """Delete those that have been there for so many seconds.

        Raises:
            OSError: the folder cannot be changed.
        """
        for part in [part for part, since in self._since.items() if time.monotonic() - since >= age]:
            if remove(part):
                del self._since[part]


def _write(folder: Path, span: Span, rows: pa.Table) -> Path:
    path = span_path(folder, span)
    write_whole(path, lambda temporary: write_part(rows, temporary))
    return path


def _neighbours(table: Table, parts: Sequence[Path], most_bytes: int) -> list[Path]:
    """The oldest parts that stand side by side, are among the smallest, and fit into one."""
    sizes = {part: _size_class(part, table) for part in parts}
    for size in sorted({size for size in sizes.values() if size is not None}):
        row: list[Path] = []
        for part in parts:
            own = sizes[part]
            if own is None or own > size:
                row = []
                continue
            follows = bool(row) and span_of(part).first == span_of(row[-1]).last + 1
            row = [*row, part] if follows else [part]
            if len(row) == FAN_IN:
                if _fit(row, table, most_bytes):
                    return row
                row = row[1:]
    return []


def _fit(parts: Sequence[Path], table: Table, most_bytes: int) -> bool:
    rows = sum(_counted(part, table) for part in parts)
    return rows <= MOST_ROWS and sum(part.stat().st_size for part in parts) <= most_bytes


def _size_class(part: Path, table: Table) -> int | None:
    """About how large a part is, as a power of what it is merged by; None for one that has to stay as it is."""
    rows = _counted(part, table)
    return int(math.log(rows, FAN_IN)) if rows else None


@lru_cache(maxsize=4096)  # a part never changes
def _counted(part: Path, table: Table) -> int:
    """The rows of a part; 0 for one of another version, or damaged."""
    try:
        with open_regular(part) as file:
            footer = pq.read_metadata(file)
    except (pa.ArrowException, OSError):
        return 0
    return int(footer.num_rows) if footer.schema.to_arrow_schema().equals(arrow_schema(table)) else 0


def _rows(part: Path, table: Table) -> pa.Table | None:
    try:
        with open_regular(part) as opened, pq.ParquetFile(opened) as file:
            return fitting(table, file.read())
    except (pa.ArrowException, OSError):
        return None
