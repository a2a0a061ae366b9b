"""The rows of a table become a Parquet file of few bytes; its footer lists the traced steps that it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ampscope.trace.files.arrow_arrays import numbers_in
from ampscope.trace.schema import Table, arrow_schema

#: The name of the index among what a footer tells.
KEY = "ampscope.traced"
#: Steps that an index tells of; a part with more of them has none, and its rows are counted.
MOST_STEPS = 2000


class ExecutionRows(NamedTuple):
    """How many rows of one execution of a step there are."""

    step: int
    source: str  #: a `Source`, or one with the number of its optimizer
    rows: int


def index_of(rows: pa.Table) -> str:
    """The index of rows of ``ops``, as JSON; empty where they are of too many steps."""
    steps, sources = numbers_in(rows["step"]), rows["source"].combine_chunks()
    encoded = sources.dictionary_encode() if isinstance(sources, pa.Array) else pa.concat_arrays(sources.chunks)
    names, codes = encoded.dictionary.to_pylist(), numbers_in(pa.chunked_array([encoded.indices]))
    changes = np.flatnonzero((np.diff(steps) != 0) | (np.diff(codes) != 0)) + 1
    if changes.size >= MOST_STEPS:
        return ""
    found: dict[tuple[int, str], int] = {}
    for begin, end in zip([0, *changes.tolist()], [*changes.tolist(), len(steps)], strict=True):
        key = int(steps[begin]), names[int(codes[begin])]
        found[key] = found.get(key, 0) + end - begin
    return json.dumps([[*key, count] for key, count in found.items()], separators=(",", ":"))


def read_index(metadata: Mapping[bytes, bytes] | None, rows: int) -> tuple[ExecutionRows, ...] | None:
    """The index that a footer holds; None where it holds none that fits its rows.

    Args:
        metadata: What the footer tells.
        rows: How many rows it tells of.
    """
    try:
        told = json.loads((metadata or {}).get(KEY.encode(), b"null"))
        found = tuple(_checked(*each) for each in told)
    except (ValueError, TypeError, RecursionError):
        return None
    return found if sum(each.rows for each in found) == rows else None


def _checked(step: Any, source: Any, rows: Any) -> ExecutionRows:
    if type(step) is not int or type(source) is not str or type(rows) is not int or rows < 1:
        raise TypeError("no step, source and number of rows")
    return ExecutionRows(step, source, rows)


#: Whole numbers that go up from row to row: what counts is by how much.
_COUNTING = frozenset({"step", "growth_tracker"})
#: Measured values, hardly one like another: the bytes of the same place in each, side by side, are alike.
_MEASURED = frozenset(
    {"min", "max", "loss", "grad_norm", "clipped_grad_norm", "time", "duration_s", "observing_s", "max_abs"}
)
#: Rows that are read at once where only a few of a large part are wanted.
_ROWS_A_GROUP = 1 << 18


def write_part(rows: pa.Table, path: Path) -> None:
    """Write rows of a table to ``path``.

    Raises:
        OSError: the disk refused.
    """
    encodings = _encodings(tuple(rows.column_names))
    dictionaries = [name for name in _leaves(rows.schema) if name not in encodings]
    with pq.ParquetWriter(
        path, rows.schema, compression="zstd", use_dictionary=dictionaries, column_encoding=encodings
    ) as part:
        part.write_table(rows.combine_chunks(), row_group_size=_ROWS_A_GROUP)
        if rows.schema.equals(arrow_schema(Table.OPS)) and (index := index_of(rows)):
            part.add_key_value_metadata({KEY: index})


@cache
def _encodings(columns: tuple[str, ...]) -> dict[str, str]:
    """The encoding of each column that is not better kept as numbers of a dictionary."""
    counting = {name: "DELTA_BINARY_PACKED" for name in columns if name in _COUNTING}
    measured = {name: "BYTE_STREAM_SPLIT" for name in columns if name in _MEASURED}
    return counting | measured


def _leaves(schema: pa.Schema) -> list[str]:
    """Returns Parquet's names of the columns; for a list, that of its elements, which are the column."""
    return [f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name for field in schema]
