"""The files of one table of one rank are sealed, joined, read back, and removed where others hold their rows.

Neighbours are packed from the oldest on, as many as fit. So of two parts that stay side by side the rows, the bytes or
the decoded bytes together are more than one part may have, and a table of few rows is one file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ampscope.errors import RunDamaged
from ampscope.trace.files.journal import read_journal
from ampscope.trace.files.layout import TEMPORARY_SUFFIX, Listing, Span, list_table, span_of, span_path
from ampscope.trace.files.parquet_part import write_part
from ampscope.trace.files.whole_files import open_regular, remove, write_whole
from ampscope.trace.read.part_columns import wrong_rows
from ampscope.trace.read.sealed_parts import (
    naming,
    read_facts,
    read_part,
    refuse_too_much,
    text_bytes,
    unreadable,
    verify,
)
from ampscope.trace.schema import BULK_TABLES, Table
from ampscope.trace.write.sealing import seal


class NotTheSame(OSError):
    """The content read back differs from the content written: the disk, or the memory, is at fault."""


def join(parts: Sequence[Path], table: Table) -> Path:
    """Write one part with the rows of several, which stand side by side and have the same columns.

    It is as old as the newest of them: the disk budget goes by that, and who asks when a run was last written.

    Returns:
        The new part; the others are still there, superseded by it.

    Raises:
        RunDamaged: one of them cannot be read.
        ValueError: a reader would refuse the rows of all of them in one file.
        OSError: the disk is full or gone, or does not keep what it was given (`NotTheSame`).
    """
    spans = [span_of(part) for part in parts]
    path = span_path(parts[0].parent, Span(spans[0].first, spans[-1].last, min(span.level for span in spans)))
    rows = pa.concat_tables([read_part(part) for part in parts])
    age = max(part.stat().st_mtime_ns for part in parts)

    def write(temporary: Path) -> None:
        write_part(rows, temporary)
        _check(temporary, path, table, rows)
        os.utime(temporary, ns=(age, age))

    write_whole(path, write)
    return path


def _check(written: Path, path: Path, table: Table, rows: pa.Table) -> None:
    with open_regular(written) as opened, pq.ParquetFile(opened) as file:
        refuse_too_much(file.metadata, written.stat().st_size, table, path)
        text_bytes(opened, file.metadata, written, loaded=file.schema_arrow.names)
        if not is_same(file.read(), rows):
            raise NotTheSame(f"what was read back of {written} is not what was written")


def is_same(one: pa.Table, other: pa.Table) -> bool:
    """Whether two tables hold the same bits: NaN equals itself, and zero is not minus zero."""
    if one.column_names != other.column_names or one.num_rows != other.num_rows:
        return False
    return all(map(_is_same, one.columns, other.columns))


def _is_same(one: pa.ChunkedArray, other: pa.ChunkedArray) -> bool:
    if one.type != other.type:
        return False
    if pa.types.is_list(one.type):
        lengths = [pa.chunked_array([each.value_lengths() for each in column.chunks]) for column in (one, other)]
        return bool(lengths[0].equals(lengths[1])) and _is_same(
            *(pa.chunked_array([each.flatten() for each in column.chunks]) for column in (one, other))
        )
    return bool(_bits(one).equals(_bits(other)))


def _bits(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Numbers with a fraction as whole numbers of the same bits."""
    if not pa.types.is_floating(column.type):
        return column
    whole = pa.int32() if column.type == pa.float32() else pa.int64()
    return pa.chunked_array([each.view(whole) for each in column.chunks], whole)


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
