"""Sealing: a full journal becomes an immutable Parquet part, with every instant of the change safe to die in."""

from __future__ import annotations

from pathlib import Path

from ampscope.trace.files.durable import remove, write_whole
from ampscope.trace.files.journal import read_journal
from ampscope.trace.files.layout import TEMPORARY_SUFFIX, list_table, part_path
from ampscope.trace.write.parquet_part import write_part


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
