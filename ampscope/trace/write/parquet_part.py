"""How the rows of a table become a Parquet file: which encoding each column gets, so that it takes few bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ampscope.trace.files.traced_index import KEY, index_of
from ampscope.trace.schema import Table, arrow_schema

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
