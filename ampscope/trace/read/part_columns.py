"""The columns that rows get on reading: the schema's, whatever a file has of them, and the writing rank."""

from __future__ import annotations

from functools import cache

import pyarrow as pa

from ampscope.trace.files.arrow_arrays import to_array
from ampscope.trace.schema import Table, arrow_schema

#: The writing rank, a column that every table gets on reading.
RANK = "rank"
RANK_FIELD = pa.field(RANK, pa.int32())
#: The run's folder, a column that each table of a fleet gets.
RUN = "run"
RUN_FIELD = pa.field(RUN, pa.string())
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


@cache
def with_rank(table: Table) -> pa.Schema:
    """The columns of a table and the writing rank."""
    return arrow_schema(table).append(RANK_FIELD)


def of_rank(rows: pa.Table, rank: int) -> pa.Table:
    """Rows with the rank that wrote them."""
    return rows.append_column(RANK_FIELD, to_array([rank] * rows.num_rows, pa.int32()))


@cache  # of a list of runs, most tables have no journal
def no_rows(schema: pa.Schema) -> pa.Table:
    """A table of these columns without rows."""
    return pa.table([to_array((), field.type) for field in schema], schema=schema)


def conform(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Null where an older writer had no such column, without those of a newer one."""
    return pa.table([_column(rows, field) for field in schema], schema=schema)


def _column(rows: pa.Table, field: pa.Field) -> pa.Array | pa.ChunkedArray:
    if field.name not in rows.column_names:
        return to_array([None] * rows.num_rows, field.type)
    column = rows[field.name]
    return column if column.type == field.type else column.cast(field.type)  # casting loads pyarrow.compute
