"""The files of one table of one rank: looked at, sealed, merged, and removed where others hold their rows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ampscope.errors import RunDamaged
from ampscope.trace.compact.joining import join
from ampscope.trace.compact.packing import Packed, packed
from ampscope.trace.files.durable import remove
from ampscope.trace.files.journal import read_journal
from ampscope.trace.files.layout import TEMPORARY_SUFFIX, Listing, list_table, span_of
from ampscope.trace.files.regular_file import open_regular
from ampscope.trace.read.column_check import wrong_rows
from ampscope.trace.read.sealed_parts import naming, read_facts, unreadable, verify
from ampscope.trace.schema import Table
from ampscope.trace.write.sealing import seal

#: Told of a file that has to stay as it is, and why.
Told = Callable[[Path, str], None]


class TableFiles:
    """Compacts a table whose rank nobody writes.

    Every change is one of three: a journal is sealed, parts get one that stands in their place, a file whose rows
    another one holds is removed. After each of them, and in the middle of it, the table has the same rows.

    Args:
        folder: The table's.
        told: Told what has to stay.
    """

    def __init__(self, folder: Path, told: Told) -> None:
        self._folder = folder
        self._table = Table(folder.name)
        self._told = told
        self._looked: dict[Path, Packed] = {}
        self._intact: dict[Path, bool] = {}
        self._apart: set[int] = set()  # numbers that do not go into one part with what is before them

    @property
    def is_at_rest(self) -> bool:
        """Whether there is nothing to seal, to merge or to remove, as far as names tell."""
        listing = list_table(self._folder)
        left = any(self._folder.glob("*" + TEMPORARY_SUFFIX))
        return len(listing.parts) < 2 and not (listing.journals or listing.superseded or left)

    @property
    def count(self) -> int:
        """The files that count: parts, and journals that are not sealed."""
        listing = list_table(self._folder)
        return len(listing.parts) + len(listing.open_journals)

    def plan(self) -> int:
        """How many files there would be."""
        listing = list_table(self._folder)
        files = sorted([*listing.parts.values(), *listing.open_journals], key=_number)
        if len(files) < 2 and not listing.open_journals:
            return len(files)
        looked = [self._look(path) for path in files]
        return sum(1 for _ in self._groups([each for each in looked if each.rows or each.columns is None]))

    def seal(self) -> int:
        """Seal the journals that a dead process left; returns how many."""
        sealed = 0
        listing = list_table(self._folder)
        for path in listing.sealed_journals:
            if self._is_intact(_holder(listing, _number(path))):
                remove(path)
        for temporary in self._folder.glob("*" + TEMPORARY_SUFFIX):
            remove(temporary)
        for journal in listing.open_journals:
            if self._look(journal).columns is not None:  # else no reader reads it, and perhaps another AMPscope will
                age = journal.stat().st_mtime_ns
                part = seal(journal)
                if part is not None:
                    os.utime(part, ns=(age, age))
                sealed += 1
        return sealed

    def merge_next(self) -> int:
        """Merge the next parts; returns how many they were, 0 where there is nothing left to merge."""
        listing = list_table(self._folder)
        if len(listing.parts) < 2:
            return 0
        files = [self._look(part) for part in listing.parts.values()]
        files += [Packed(path=journal) for journal in listing.open_journals]  # none is merged over one
        for group in self._groups(sorted(files, key=lambda each: _number(each.path))):
            if len(group) > 1:
                return self._merge([each.path for each in group]) or self.merge_next()
        return 0

    def clear(self, *, age: float) -> int:
        """Remove parts whose rows another one has held for ``age`` seconds; returns how many wait for that."""
        listing = list_table(self._folder)
        waiting = 0
        for path in listing.superseded:
            holder = _holder(listing, _number(path))
            if not self._is_intact(holder):
                continue
            is_young = time.time() - holder.stat().st_ctime < age  # renamed to its name then
            waiting += is_young or not remove(path)
        return waiting

    def _merge(self, parts: list[Path]) -> int:
        """Merge some parts; where that cannot be they will not be looked for together again."""
        try:
            join(parts, self._table)
        except RunDamaged as error:
            damaged = next((part for part in parts if not self._is_intact(part)), parts[0])
            self._looked[damaged] = Packed(path=damaged)
            self._told(damaged, str(error))
            return 0
        except ValueError:  # a reader would refuse them as one: each half is another matter
            self._apart.add(_number(parts[len(parts) // 2]))
            return 0
        return len(parts)

    def _groups(self, files: list[Packed]) -> Iterator[list[Packed]]:
        stretch: list[Packed] = []
        for each in files:
            if _number(each.path) in self._apart:
                yield from packed(stretch, self._table)
                stretch = []
            stretch.append(each)
        yield from packed(stretch, self._table)

    def _look(self, path: Path) -> Packed:
        """A file as it is packed; looked at once, for none changes."""
        if path not in self._looked:
            is_part = path.suffix == ".parquet"
            try:
                self._looked[path] = _part(path, self._table) if is_part else _journal(path, self._table)
            except RunDamaged as error:
                self._told(path, str(error))
                self._looked[path] = Packed(path=path)
        return self._looked[path]

    def _is_intact(self, part: Path) -> bool:
        """Whether a part can be read to the end, so that what it holds is not needed elsewhere."""
        if part not in self._intact:
            self._intact[part] = True
            try:
                verify(part)
            except RunDamaged as error:
                self._told(part, str(error))
                self._intact[part] = False
        return self._intact[part] and part.exists()


def _number(path: Path) -> int:
    return span_of(path).first if path.suffix == ".parquet" else int(path.stem.removeprefix("journal-"))


def _holder(listing: Listing, number: int) -> Path:
    """The part that holds the rows of a number."""
    return listing.parts[max(first for first in listing.parts if first <= number)]


def _part(path: Path, table: Table) -> Packed:
    read_facts(path, table)
    with naming(path), open_regular(path) as file:
        footer = pq.read_metadata(file)
    groups = [footer.row_group(place) for place in range(footer.num_row_groups)]
    columns = [group.column(place) for group in groups for place in range(group.num_columns)]
    return Packed(
        path=path,
        rows=footer.num_rows,
        size=sum(column.total_compressed_size for column in columns),
        decoded=sum(column.total_uncompressed_size for column in columns),
        columns=footer.schema.to_arrow_schema().remove_metadata(),
    )


def _journal(path: Path, table: Table) -> Packed:
    try:
        rows: pa.Table = read_journal(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if rows.num_rows and (why := wrong_rows(table, rows)):
        raise unreadable(path, why)
    size = path.stat().st_size
    return Packed(path=path, rows=rows.num_rows, size=size, decoded=size, columns=rows.schema.remove_metadata())
