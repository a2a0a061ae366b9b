"""What the database selects of a part's file: the schema's columns and the writing rank."""

from __future__ import annotations

import pyarrow as pa

from ampscope.trace.schema import Table, arrow_schema

#: The writing rank, a column that every table gets on reading.
RANK = "rank"
RANK_FIELD = pa.field(RANK, pa.int32())
#: The rank of a part, from the end of its path: a folder above the run may be called ``rank=3`` as well.
_RANK_OF_PART = f"regexp_extract(filename, '[/\\\\]rank=(\\d+)[/\\\\][^/\\\\]+[/\\\\][^/\\\\]+$', 1)::INTEGER AS {RANK}"
_SQL_TYPES = {
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.bool_(): "BOOLEAN",
    pa.string(): "VARCHAR",
}


def selection(table: Table, columns: tuple[str, ...]) -> str:
    """The schema's columns in their order, with null for those that the part does not have."""
    fields = arrow_schema(table)
    names = (f'"{f.name}"' if f.name in columns else f'NULL::{_sql_type(f.type)} AS "{f.name}"' for f in fields)
    return ", ".join([*names, _RANK_OF_PART])


def _sql_type(kind: pa.DataType) -> str:
    return f"{_sql_type(kind.value_type)}[]" if pa.types.is_list(kind) else _SQL_TYPES[kind]
