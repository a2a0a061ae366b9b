"""The journal is an append-only Arrow IPC stream that is readable up to whatever instant its writer died at.

The message of a row differs from that of another one only in its values, as long as the same columns are null and texts
are as long. So Arrow itself makes the first of each kind, and the next ones are packed into its frame.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from ampscope.trace.files.arrow_arrays import to_array
from ampscope.trace.files.whole_files import open_regular
from ampscope.trace.schema import Row, Table, arrow_schema, columns_of

#: Bytes read of one journal; it is sealed at a fraction of them.
_MOST_BYTES = 1 << 30


def to_batch(table: Table, rows: Sequence[Row]) -> pa.RecordBatch:
    """Turn rows of one table into columns.

    Raises:
        ValueError: a row has the wrong length, nothing where a value is required, or a text that is not Unicode.
        TypeError: a value has the wrong type.
        OverflowError: an integer does not fit its column.
    """
    schema = arrow_schema(table)
    columns = [_column(field, column) for field, column in zip(schema, columns_of(table, rows), strict=True)]
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
        self.size = 0  #: bytes of whole messages
        self._is_whole = True  # no message has been left half written
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
        self._write(schema.serialize())

    def append(self, batch: pa.RecordBatch) -> None:
        """Hand a batch to the operating system.

        Raises:
            OSError: the disk is full or gone; what was appended before stays readable, and so is what may follow.
        """
        self.append_message(batch.serialize(), batch.num_rows)

    def append_message(self, message: pa.Buffer | bytes, rows: int) -> None:
        """Appends a batch of ``rows`` rows that is serialized already, as `append` does."""
        self._write(message)
        self.rows += rows
        self.batches += 1

    def close(self) -> None:
        """Close the file; it stays readable. A message that was still being appended is refused from here on."""
        descriptor, self._descriptor = self._descriptor, -1  # whose number another file may be given
        os.close(descriptor)

    def _write(self, message: pa.Buffer | bytes) -> None:
        if not self._is_whole:
            os.ftruncate(self._descriptor, self.size)
            os.lseek(self._descriptor, self.size, os.SEEK_SET)
        self._is_whole = False
        rest = memoryview(message)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self.size += len(message)
        self._is_whole = True


class UnfamiliarJournal(OSError):
    """A journal that no writer has left."""


def is_compressed(metadata: pa.Buffer) -> bool:
    """Whether a batch is compressed: a small one could hold gigabytes.

    Args:
        metadata: Of its message: a flatbuffer ``Message``, whose ``header`` is a ``RecordBatch``.

    Raises:
        struct.error: it is no such thing.
    """
    data = metadata.to_pybytes()
    header = _field(data, struct.unpack_from("<I", data, 0)[0], 2)
    if header is None:
        return False
    return _field(data, header + struct.unpack_from("<I", data, header)[0], 3) is not None


def _field(data: bytes, table: int, number: int) -> int | None:
    """Returns the place of a field of a flatbuffer's table; None where the field is not set."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    place = 4 + 2 * number
    if fields < 0 or place >= struct.unpack_from("<H", data, fields)[0]:
        return None
    offset = struct.unpack_from("<H", data, fields + place)[0]
    return table + offset if offset else None


class JournalReader:
    """Reads a journal that may still be growing; each `read` parses only what was appended since the one before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0  #: bytes that were read as whole messages
        self._schema: pa.Schema | None = None
        self._batches: list[pa.RecordBatch] = []

    def read(self) -> pa.Table:
        """Every batch that is whole by now; a torn last one, or one still being written, ends the table.

        Raises:
            OSError: the file cannot be opened (it may just have been sealed), or is none that a writer left.
        """
        with open_regular(self._path) as file:
            file.seek(self._offset)
            rest = file.read(_MOST_BYTES + 1)
        if len(rest) > _MOST_BYTES:
            raise OSError(f"it is larger than the {_MOST_BYTES:,} bytes that are read of such a file")
        content = pa.BufferReader(rest)
        try:
            self._take_all(content)
        except UnfamiliarJournal:
            raise
        except (pa.ArrowException, OSError, EOFError, struct.error):  # the torn end
            pass
        return pa.Table.from_batches(self._batches, self._schema or pa.schema([]))

    def _take_all(self, content: pa.BufferReader) -> None:
        begin = self._offset
        while content.tell() < content.size():
            message = pa.ipc.read_message(content)
            if self._schema is None:
                self._schema = pa.ipc.read_schema(message)
            elif is_compressed(message.metadata):
                raise UnfamiliarJournal("its batches are compressed, which those of no writer are")
            else:
                batch = pa.ipc.read_record_batch(message, self._schema)
                batch.validate(full=True)
                self._batches.append(batch)
            self._offset = begin + content.tell()


def read_journal(path: Path) -> pa.Table:
    """Read every batch that is whole.

    Raises:
        OSError: the file cannot be opened (it may just have been sealed).
    """
    return JournalReader(path).read()


#: A value and what fills it up to eight bytes, as `struct` writes them.
_FORMATS = {
    pa.bool_(): "?7x",
    pa.int16(): "h6x",
    pa.int32(): "i4x",
    pa.int64(): "q",
    pa.float32(): "f4x",
    pa.float64(): "d",
}
#: Kinds of rows that are kept; a loop makes a few.
_MOST_KINDS = 64


class _Frame(NamedTuple):
    """The bytes that all messages of one kind of row share, and the format of the rest."""

    head: bytes
    body: struct.Struct


class RowMessages:
    """Makes the messages of a table's rows.

    Raises:
        KeyError: The table has a column of lists.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        kinds = [field.type for field in arrow_schema(table)]
        self._types = [None if pa.types.is_string(kind) else _FORMATS[kind] for kind in kinds]
        self._texts = [place for place, kind in enumerate(self._types) if kind is None]
        self._frames: dict[tuple[int | None, ...], _Frame | None] = {}

    def message(self, row: Row) -> Any:
        """The message: bytes, or a buffer of them.

        Raises:
            ValueError, TypeError, OverflowError: As `to_batch`.
        """
        values: list[Any] = list(row)
        for place in self._texts:
            if values[place] is not None:
                values[place] = str.encode(values[place])
        kind = tuple([None if value is None else len(value) if type(value) is bytes else 0 for value in values])
        frame = self._frames.get(kind)
        if frame is not None:
            try:
                return frame.head + frame.body.pack(*_arguments(values))
            except (struct.error, OverflowError):  # a value that does not fit: Arrow says which, or what becomes of it
                pass
        whole = to_batch(self._table, [row]).serialize()
        if kind not in self._frames:
            self._learn(kind, values, whole.to_pybytes())
        return whole

    def _learn(self, kind: tuple[int | None, ...], values: list[Any], whole: bytes) -> None:
        """Keeps the frame of a message, if what is packed into it is what Arrow has packed."""
        if len(self._frames) >= _MOST_KINDS:
            self._frames.clear()
        body = struct.Struct("<" + "".join(map(_format, self._types, kind)))
        is_same = whole.endswith(body.pack(*_arguments(values)))
        self._frames[kind] = _Frame(whole[: -body.size], body) if is_same else None


def _format(kind: str | None, size: int | None) -> str:
    """Returns the `struct` format of one value: null bits only where it is null; of a text its offsets and bytes."""
    if size is None:
        return "16x"
    return kind or f"ii{size}s{-size % 8}x"


def _arguments(values: list[Any]) -> list[Any]:
    given: list[Any] = []
    for value in values:
        if type(value) is bytes:
            given += 0, len(value), value
        elif value is not None:
            given.append(value)
    return given
