"""The journal: an append-only Arrow IPC stream that is readable up to whatever instant its writer died at."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from ampscope.trace.columns import to_array
from ampscope.trace.schema import Row, Table, arrow_schema


def to_batch(table: Table, rows: Sequence[Row]) -> pa.RecordBatch:
    """Turn rows of one table into columns.

    Raises:
        ValueError: a row has the wrong length, nothing where a value is required, or a text that is not Unicode.
        TypeError: a value has the wrong type.
        OverflowError: an integer does not fit its column.
    """
    schema = arrow_schema(table)
    values = zip(*rows, strict=True) if rows else [()] * len(schema)
    columns = [_column(field, column) for field, column in zip(schema, values, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(field: pa.Field, values: Sequence[object]) -> pa.Array:
    column = to_array(values, field.type)
    if column.null_count and not field.nullable:
        raise ValueError(f"column {field.name!r} must not be null")
    return column


class Journal:
    """One journal file, open for appending. A batch is one write to the operating system, so a kill loses none."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        """Create the file.

        Raises:
            OSError: it cannot be created, or exists.
        """
        self.path = path
        self.rows = 0
        self.batches = 0
        self.size = 0  #: bytes
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
        self._write(schema.serialize())

    def append(self, batch: pa.RecordBatch) -> None:
        """Hand a batch to the operating system.

        Raises:
            OSError: the disk is full or gone; what was appended before stays readable.
        """
        self._write(batch.serialize())
        self.rows += batch.num_rows
        self.batches += 1

    def close(self) -> None:
        """Close the file; it stays readable."""
        os.close(self._descriptor)

    def _write(self, message: pa.Buffer) -> None:
        rest = memoryview(message)
        self.size += len(rest)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


def read_journal(path: Path) -> pa.Table:
    """Read every batch that is whole; a torn last one, or one still being written, ends the table.

    Raises:
        OSError: the file cannot be opened (it may just have been sealed).
    """
    content = path.read_bytes()
    try:
        stream = pa.ipc.open_stream(content)
    except (pa.ArrowException, OSError):
        return pa.Table.from_batches([], pa.schema([]))
    return pa.Table.from_batches(_whole_batches(stream), stream.schema)


def _whole_batches(stream: pa.RecordBatchStreamReader) -> list[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = []
    try:
        for batch in stream:
            batch.validate(full=True)
            batches.append(batch)
    except (pa.ArrowException, OSError):
        pass  # the torn end
    return batches
