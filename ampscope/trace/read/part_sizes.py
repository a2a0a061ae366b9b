"""How much a part holds once it is decoded, and whether that is more than a part may hold.

A file of some hundred bytes can name one text of a megabyte a million times, and a page of it can be larger than its
footer says. So the footer is not taken at its word: the headers of pages are read where texts and lists are decoded,
which are of any length, and what texts come to is counted by the database where the headers alone do not bound it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from ampscope.trace.files.layout import span_of
from ampscope.trace.files.page_headers import chunk_of
from ampscope.trace.read.engines.database import sealed_off
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
