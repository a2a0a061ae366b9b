"""Several parts as one file with the same rows, to the last bit, which is read back before it gets its name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ampscope.trace.files.durable import write_whole
from ampscope.trace.files.layout import Span, span_of, span_path
from ampscope.trace.files.regular_file import open_regular
from ampscope.trace.read.part_sizes import refuse_too_much, text_bytes
from ampscope.trace.read.sealed_parts import read_part
from ampscope.trace.schema import Table
from ampscope.trace.write.parquet_part import write_part


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
