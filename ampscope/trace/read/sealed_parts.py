"""One sealed part of a table is read: its footer, columns and decoded size are checked before anything else.

A trace may be damaged or a stranger's. What holds for every row is settled here, from the footer alone: the columns are
there, are of their types and hold no null where none may be, and there are no more rows than a part has.

A file of some hundred bytes can name one text of a megabyte a million times, and a page of it can be larger than its
footer says. So the footer is not taken at its word: the headers of pages are read where texts and lists are decoded,
which are of any length, and what texts come to is counted by the database where the headers alone do not bound it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from ampscope.errors import RunDamaged
from ampscope.trace.files.layout import span_of
from ampscope.trace.files.parquet_part import ExecutionRows, read_index
from ampscope.trace.files.whole_files import open_regular
from ampscope.trace.read.duckdb_engine import sealed_off
from ampscope.trace.read.page_headers import chunk_of
from ampscope.trace.read.part_columns import wrong_with
from ampscope.trace.schema import BULK_TABLES, Table, arrow_schema

#: Rows of a part, at most: a journal is sealed at an eighth of them.
_MOST_ROWS = 1 << 21
#: Bytes that its columns take as they are encoded, and its lists decoded, at most: a journal is sealed at 16 MiB.
_MOST_BYTES = 1 << 30
#: Bytes of its texts, decoded, at most; of all parts of a table so many, or so many for each row.
MOST_TEXT, MOST_TABLE_TEXT, MOST_TEXT_A_ROW = 512 << 20, 512 << 20, 256
#: Rows of a small table's part that may take next to nothing; others take a byte, or of old steps a sixteenth of it.
_FREE_ROWS = 1 << 16
_ROWS_PER_BYTE = 16


def refuse_too_much(footer: pq.FileMetaData, size: int, table: Table, part: Path) -> None:
    """Refuse a part whose footer declares more than a part may hold.

    Raises:
        ValueError: it does.
    """
    share = _ROWS_PER_BYTE if span_of(part).level else 1
    most = _MOST_ROWS if table in BULK_TABLES else min(_MOST_ROWS, _FREE_ROWS + size * share)
    if footer.num_rows > most:
        raise ValueError(f"it declares {footer.num_rows:,} rows; of such a file up to {most:,} are read")
    told = sum(footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))
    told += sum(8 * column.num_values for column, is_list in _columns(footer) if is_list)
    if told > _MOST_BYTES:
        raise ValueError(f"it declares {told:,} bytes of columns; up to {_MOST_BYTES:,} are read")


def text_bytes(file: BinaryIO, footer: pq.FileMetaData, part: Path, *, loaded: Collection[str] | None = None) -> int:
    """Bytes that a part's texts take at most once they are decoded.

    Args:
        file: The part.
        footer: Its footer.
        part: Where it lies.
        loaded: The columns at whose pages to look; by default those of texts and lists.

    Raises:
        ValueError: pages declare more than the footer, or texts take more than `MOST_TEXT`.
    """
    bound = 0
    names = set()
    for column, is_list in _columns(footer):
        is_text = column.physical_type == "BYTE_ARRAY"
        name = column.path_in_schema.partition(".")[0]
        if not (is_text or is_list if loaded is None else name in loaded):
            continue
        chunk = chunk_of(file, column)
        if is_text:
            bound += chunk.pages - chunk.dictionary + column.num_values * chunk.dictionary
            names.add((name, is_list))
    if bound <= MOST_TEXT:
        return bound
    counted = _counted(part.parent, [str(part)], names)
    if counted > MOST_TEXT:
        raise ValueError(f"its texts take {counted:,} bytes when they are decoded; up to {MOST_TEXT:,} are read")
    return counted


def refuse_too_many_texts(
    run: Path, table: Table, *, rows: int, bound: int, parts: Mapping[tuple[str, ...], Sequence[str]]
) -> None:
    """Refuse a table whose parts together hold more text than is read of one; counted where a bound does not tell.

    Args:
        run: The run's folder.
        table: Which.
        rows: Its rows.
        bound: Bytes that its texts take at most, summed over its parts.
        parts: Its files, by the columns that they have.

    Raises:
        ValueError: it does.
    """
    most = max(MOST_TABLE_TEXT, MOST_TEXT_A_ROW * rows)
    if bound <= most:
        return
    lists = {field.name: pa.types.is_list(field.type) for field in arrow_schema(table) if _is_text(field.type)}
    counted = sum(
        _counted(run, paths, {(name, lists[name]) for name in columns if name in lists})
        for columns, paths in parts.items()
    )
    if counted > most:
        raise ValueError(f"its texts take {counted:,} bytes when they are decoded; up to {most:,} are read")


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or (pa.types.is_list(kind) and _is_text(kind.value_type))


def _counted(folder: Path, parts: Sequence[str], names: Collection[tuple[str, bool]]) -> int:
    """Bytes of texts in these columns, counted without decoding them one by one."""
    lengths = ", ".join(_length(name, is_list=is_list) for name, is_list in sorted(names))
    try:
        with closing(sealed_off(folder)) as database:
            (row,) = database.read_parquet(list(parts), hive_partitioning=False).aggregate(lengths).fetchall()
    except duckdb.Error as error:
        raise ValueError(str(error)) from error
    return sum(int(each or 0) for each in row)


def _length(name: str, *, is_list: bool) -> str:
    column = '"' + name.replace('"', '""') + '"'
    return (
        f"sum(list_sum(list_transform({column}, lambda text: strlen(text))))" if is_list else f"sum(strlen({column}))"
    )


def _columns(footer: pq.FileMetaData) -> Iterator[tuple[pq.ColumnChunkMetaData, bool]]:
    """The columns of each row group, and whether they are the elements of lists."""
    lists = [footer.schema.column(place).max_repetition_level > 0 for place in range(footer.num_columns)]
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        yield from ((group.column(place), is_list) for place, is_list in enumerate(lists))


#: Rows that are read sooner by several threads.
_MANY_ROWS = 1 << 16


class Facts(NamedTuple):
    """Holds the facts in a sealed part's footer; null steps where it tells none."""

    columns: tuple[str, ...]
    rows: int
    first_step: int | None
    last_step: int | None
    traced: tuple[ExecutionRows, ...] | None = None  #: of ops, what was traced; null where the footer does not tell

    def may_hold(self, steps: Sequence[int] | None) -> bool:
        """Whether rows of one of these steps, which ascend, can be in the part; None for those of any."""
        if steps is None or self.first_step is None or self.last_step is None:
            return True
        place = bisect_left(steps, self.first_step)
        return place < len(steps) and steps[place] <= self.last_step


def read_facts(part: Path, table: Table, texts: dict[Path, int] | None = None) -> Facts:
    """Reads the footer of a part.

    Args:
        part: The part.
        table: Its table.
        texts: Where given, takes what `texts_in` says of the part: two looks at a file that is opened once.

    Raises:
        FileNotFoundError: the part has been deleted since it was listed.
        RunDamaged: it cannot be read, or is no part of that table.
    """
    with naming(part), open_regular(part) as file:
        footer = pq.read_metadata(file)
        facts = _facts_in(footer, file.seek(0, 2), table, part)
        if texts is not None:
            texts[part] = text_bytes(file, footer, part)
    return facts


def _facts_in(footer: pq.FileMetaData, size: int, table: Table, part: Path) -> Facts:
    schema = footer.schema.to_arrow_schema()
    bounds = list(_step_bounds(footer))
    if why := wrong_with(table, schema):
        raise unreadable(part, why)
    refuse_too_much(footer, size, table, part)
    columns, rows = tuple(schema.names), footer.num_rows
    traced = read_index(footer.metadata, rows) if table is Table.OPS else None
    if not bounds or None in bounds:
        return Facts(columns, rows, None, None, traced)
    return Facts(columns, rows, min(low for low, _ in bounds), max(high for _, high in bounds), traced)


def texts_in(part: Path) -> int:
    """Bytes that a part's texts take at most once they are decoded.

    Raises:
        FileNotFoundError: the part has been deleted since it was listed.
        RunDamaged: they are too many, or pages of texts or lists are larger than the footer says.
    """
    with naming(part), open_regular(part) as file:
        return text_bytes(file, pq.read_metadata(file), part)


def read_part(part: Path) -> pa.Table:
    """All columns of a part.

    Raises:
        FileNotFoundError: the part has been deleted since it was listed.
        RunDamaged: it cannot be read.
    """
    with naming(part), open_regular(part) as opened, pq.ParquetFile(opened) as file:
        return _read(opened, file, part, file.schema_arrow.names)


def read_columns(part: Path, table: Table, columns: Collection[str]) -> tuple[Facts, pa.Table]:
    """Reads a part's footer and some of its columns, opening it once; columns that it does not have are left out.

    Raises:
        FileNotFoundError: the part has been deleted since it was listed.
        RunDamaged: it cannot be read, or is no part of that table.
    """
    with naming(part), open_regular(part) as opened, pq.ParquetFile(opened) as file:
        facts = _facts_in(file.metadata, opened.seek(0, 2), table, part)
        return facts, _read(opened, file, part, [name for name in facts.columns if name in columns])


def _read(opened: BinaryIO, file: pq.ParquetFile, part: Path, columns: list[str]) -> pa.Table:
    text_bytes(opened, file.metadata, part, loaded=columns)
    rows = file.read(columns, use_threads=file.metadata.num_rows > _MANY_ROWS)
    rows.validate(full=True)
    return rows


def bound(connection: duckdb.DuckDBPyConnection, parts: list[str]) -> duckdb.DuckDBPyRelation:
    """Parts as a relation, with the name of the file of each row.

    Raises:
        duckdb.Error: one of them has been deleted since it was listed.
        RunDamaged: they are there, and cannot be read.
    """
    try:
        return connection.read_parquet(parts, hive_partitioning=False, filename=True)
    except duckdb.Error as error:
        if not all(Path(part).exists() for part in parts):
            raise
        for part in map(Path, parts):
            verify(part)
        others = f", or another of the {len(parts)} like it" if len(parts) > 1 else ""
        raise unreadable(Path(parts[0]), f"{error}{others}") from error


def verify(part: Path) -> None:
    """Read a part in vain; one that has been deleted is passed over.

    Raises:
        RunDamaged: it cannot be read.
    """
    with suppress(FileNotFoundError), naming(part), open_regular(part) as opened, pq.ParquetFile(opened) as file:
        text_bytes(opened, file.metadata, part, loaded=file.schema_arrow.names)
        for group in range(file.num_row_groups):
            file.read_row_group(group).validate(full=True)


@contextmanager
def naming(part: Path) -> Iterator[None]:
    """Names the file in errors that are raised within the block."""
    try:
        yield
    except FileNotFoundError:  # deleted by the disk budget since it was listed
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise unreadable(part, error) from error


def unreadable(file: Path, why: object) -> RunDamaged:
    """A file that cannot be read."""
    return RunDamaged(
        f"{file} cannot be read ({why}). Move that file away and open the run again: the rest of it is intact."
    )


def _step_bounds(footer: pq.FileMetaData) -> Iterator[Any]:
    """Yields for each row group its smallest and largest step; None where they are not known."""
    place = next((n for n in range(footer.num_columns) if footer.schema.column(n).path == "step"), None)
    for number in range(footer.num_row_groups if place is not None else 0):
        told = footer.row_group(number).column(place).statistics
        yield (told.min, told.max) if told is not None and told.has_min_max else None
