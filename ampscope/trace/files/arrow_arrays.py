"""Python values become Arrow arrays, Arrow arrays become numpy's, and columns become a block of rows.

``pyarrow.array`` and ``to_numpy`` would do, but their first call imports pandas wherever that is installed: half a
second of a guest's time in a training process, and a failure of its own when the interpreter is about to exit.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ampscope.trace.schema import Table, arrow_schema

_TYPECODES = {pa.int16(): "h", pa.int32(): "i", pa.int64(): "q", pa.float32(): "f", pa.float64(): "d"}
_OFFSETS = "i"


def to_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """The values, None as null, as an Arrow array of one of the types that the trace schema uses.

    Raises:
        TypeError: a value is of another kind (a fraction for an integer, a number for a text).
        ValueError: a text that is not valid Unicode.
        OverflowError: an integer that does not fit.
    """
    validity = None
    if None in values:
        validity = _bits([value is not None for value in values])
    if pa.types.is_list(kind):
        return _lists(values, kind, validity)
    return pa.Array.from_buffers(kind, len(values), [validity, *_buffers(values, kind)])


def numbers_in(column: pa.ChunkedArray) -> NDArray[Any]:
    """The values of a column of numbers or flags; where they are null, whatever lies there."""
    array = _whole(column)
    buffer = array.buffers()[1]
    if pa.types.is_boolean(array.type):
        return _flags(buffer, array)
    kind = np.dtype(_TYPECODES[array.type])
    if buffer is None:
        return np.zeros(len(array), kind)
    return np.frombuffer(buffer, kind, count=len(array), offset=array.offset * kind.itemsize)


def known_in(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Returns a mask of the values of a column that are not null."""
    array = _whole(column)
    validity = array.buffers()[0]
    return np.ones(len(array), bool) if validity is None else _flags(validity, array)


def column_of(values: NDArray[Any], kind: pa.DataType, known: NDArray[np.bool_] | None = None) -> pa.Array:
    """Numbers as an Arrow array, null where they are not ``known``."""
    held = np.ascontiguousarray(values, dtype=np.dtype(_TYPECODES[kind]))
    validity = None if known is None else pa.py_buffer(np.packbits(known, bitorder="little").tobytes())
    return pa.Array.from_buffers(kind, len(held), [validity, pa.py_buffer(held)])


def flags_of(values: NDArray[np.bool_]) -> pa.Array:
    """Flags as an Arrow array."""
    bits = pa.py_buffer(np.packbits(values, bitorder="little").tobytes())
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, bits])


def text_of(text: str, rows: int) -> pa.Array:
    """An Arrow array with the same text in every row."""
    encoded = text.encode()
    ends = np.arange(rows + 1, dtype=np.dtype(_OFFSETS)) * np.dtype(_OFFSETS).type(len(encoded))
    return pa.Array.from_buffers(pa.string(), rows, [None, pa.py_buffer(ends), pa.py_buffer(encoded * rows)])


def _whole(column: pa.ChunkedArray) -> pa.Array:
    joined = column.combine_chunks()
    return pa.concat_arrays(joined.chunks) if isinstance(joined, pa.ChunkedArray) else joined


def _flags(bits: pa.Buffer | None, array: pa.Array) -> NDArray[np.bool_]:
    if bits is None:
        return np.zeros(len(array), bool)
    each = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return each[array.offset : array.offset + len(array)].astype(bool)


def _buffers(values: Sequence[Any], kind: pa.DataType) -> list[pa.Buffer]:
    if pa.types.is_string(kind):
        texts = [b"" if value is None else str.encode(value) for value in values]
        return [_offsets(texts), pa.py_buffer(b"".join(texts))]
    filled = [0 if value is None else value for value in values] if None in values else values
    if pa.types.is_boolean(kind):
        return [_bits(filled)]
    return [pa.py_buffer(array(_TYPECODES[kind], filled))]


def _lists(values: Sequence[Any], kind: pa.DataType, validity: pa.Buffer | None) -> pa.Array:
    lists = [value or () for value in values]
    children = to_array(list(chain.from_iterable(lists)), kind.value_type)
    return pa.Array.from_buffers(kind, len(lists), [validity, _offsets(lists)], children=[children])


def _offsets(items: Sequence[Sequence[Any]]) -> pa.Buffer:
    return pa.py_buffer(array(_OFFSETS, accumulate(map(len, items), initial=0)))


def _bits(flags: Sequence[Any]) -> pa.Buffer:
    """One bit each, the first in the lowest bit of the first byte."""
    digits = "".join(["1" if flag else "0" for flag in reversed(flags)])
    return pa.py_buffer(int(digits or "0", 2).to_bytes((len(flags) + 7) // 8, "little"))


@dataclass(frozen=True, slots=True)
class ColumnBlock:
    """Rows of one table.

    Attributes:
        rows: How many.
        columns: By name, numbers, flags or (as objects) tuples of that many, or one text or integer that all rows have.
            A column that is missing is null.
        known: Of columns with nulls, which values are none.
    """

    rows: int
    columns: Mapping[str, NDArray[Any] | str | int]
    known: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.rows

    def fitting(self, table: Table) -> ColumnBlock:
        """The rows whose integers all fit their columns."""
        fits = np.ones(self.rows, bool)
        for kind, values in self._integers(table):
            fits &= (values >= kind.min) & (values <= kind.max)
        return self.where(fits)

    def where(self, chosen: NDArray[np.bool_]) -> ColumnBlock:
        """The rows that are chosen."""
        columns = {
            name: value if isinstance(value, (str, int)) else value[chosen] for name, value in self.columns.items()
        }
        known = {name: value[chosen] for name, value in self.known.items()}
        return replace(self, rows=int(chosen.sum()), columns=columns, known=known)

    def to_batch(self, table: Table) -> pa.RecordBatch:
        """The rows as they are written.

        Raises:
            ValueError: nothing where a value is required.
            OverflowError: an integer does not fit its column.
        """
        for kind, values in self._integers(table):
            if self.rows and (values.min() < kind.min or values.max() > kind.max):
                raise OverflowError(f"{kind.dtype} holds no {values.min()} or {values.max()}")
        schema = arrow_schema(table)
        return pa.RecordBatch.from_arrays([self._column(each) for each in schema], schema=schema)

    def _column(self, column: pa.Field) -> pa.Array:
        value, kind = self.columns.get(column.name), column.type
        if value is None:
            if not column.nullable:
                raise ValueError(f"column {column.name!r} must not be null")
            return pa.nulls(self.rows, kind)
        if isinstance(value, str):
            return text_of(value, self.rows)
        if isinstance(value, int):
            value = np.full(self.rows, value)
        if pa.types.is_list(kind):
            return to_array(value.tolist(), kind)
        return flags_of(value) if pa.types.is_boolean(kind) else column_of(value, kind, self.known.get(column.name))

    def _integers(self, table: Table) -> list[tuple[np.iinfo[Any], NDArray[Any]]]:
        """The columns of integers that may not fit, and what fits them."""
        columns = [(each.type, self.columns.get(each.name)) for each in arrow_schema(table)]
        return [
            (np.iinfo(np.int16 if kind == pa.int16() else np.int32), np.atleast_1d(value))
            for kind, value in columns
            if kind in {pa.int16(), pa.int32()} and value is not None and not isinstance(value, str)
        ]
