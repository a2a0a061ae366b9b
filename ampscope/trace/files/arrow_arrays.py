"""Python values into Arrow arrays, buffer by buffer.

``pyarrow.array`` would do, but its first call imports pandas wherever that is installed: half a second of a guest's
time in a training process, and a failure of its own when the interpreter is about to exit.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa

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
