"""Decides which neighbouring parts of a table are joined into one.

Neighbours are packed from the oldest on, as many as fit. So of two parts that stay side by side the rows, the bytes or
the decoded bytes together are more than one part may have, and a table of few rows is one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ampscope.trace.schema import BULK_TABLES, Table

#: Bytes of one part, compressed and decoded, and its rows; a part of a bulk table may have more of them.
MOST_BYTES, MOST_DECODED = 16 << 20, 256 << 20
MOST_ROWS, MOST_BULK_ROWS = 300_000, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A file of a table: a part, or a journal that would be one.

    Attributes:
        path: Where it lies.
        rows: How many it holds.
        size: Bytes of its columns, compressed.
        decoded: Bytes of its columns, decoded.
        columns: Its columns and their types; None of what has to stay as it is.
    """

    path: Path
    rows: int = 0
    size: int = 0
    decoded: int = 0
    columns: pa.Schema | None = None


def packed(files: Sequence[Packed], table: Table) -> Iterator[list[Packed]]:
    """The files, in order, in the groups that become one file each; those that stay are groups of one."""
    group: list[Packed] = []
    for each in files:
        if group and not _fits([*group, each], table):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _fits(group: Sequence[Packed], table: Table) -> bool:
    columns = group[0].columns
    if columns is None or any(each.columns is None or not each.columns.equals(columns) for each in group):
        return False
    most_rows = MOST_BULK_ROWS if table in BULK_TABLES else MOST_ROWS
    return (
        sum(each.rows for each in group) <= most_rows
        and sum(each.size for each in group) <= MOST_BYTES
        and sum(each.decoded for each in group) <= MOST_DECODED
    )
