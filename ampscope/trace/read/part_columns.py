"""Files are checked for a table's columns; on reading, rows get the schema's columns and the writing rank."""

from __future__ import annotations

from functools import cache

import pyarrow as pa

from ampscope.trace.files.arrow_arrays import to_array
from ampscope.trace.read.older_versions import columns_added, is_older, old_type
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


#: Names of columns that reading adds.
_OURS = frozenset({"filename", "rank"})


def wrong_with(table: Table, schema: pa.Schema) -> str:
    """Why columns like these are none of ``table``, in any version that is read; empty where they are.

    Columns that no version has had are passed over, as those of a newer one.
    """
    folded = [name.casefold() for name in schema.names]
    if len(set(folded)) < len(folded) or not _OURS.isdisjoint(folded):
        return "its columns have names that no table's have"
    found = {field.name: field for field in schema}
    later = columns_added(table) if is_older(table, found) else frozenset()
    for field in arrow_schema(table):
        own = found.get(field.name)
        if own is None:
            if not field.nullable and field.name not in later:
                return f"it lacks the column {field.name!r}"
        elif own.type != field.type:
            return f"its column {field.name!r} is of type {own.type}, not {field.type}"
        elif own.nullable and not field.nullable:
            return f"its column {field.name!r} may be null"
    return _wrong_before(table, found)


def wrong_rows(table: Table, rows: pa.Table) -> str:
    """Why loaded rows are none of ``table``; empty where they are."""
    required = [field.name for field in arrow_schema(table) if not field.nullable]
    empty = (name for name in required if name in rows.column_names and rows[name].null_count)
    return wrong_with(table, rows.schema) or next((f"its column {name!r} holds nulls" for name in empty), "")


def has_null_elements(column: pa.ChunkedArray) -> bool:
    """Whether a list in a column of lists holds a null, which no table's has."""
    suspect = (chunk for chunk in column.chunks if chunk.values.null_count)  # to flatten loads pyarrow.compute
    return any(chunk.flatten().null_count for chunk in suspect)


def _wrong_before(table: Table, found: dict[str, pa.Field]) -> str:
    """Says what is wrong with the columns that an older version had; empty where nothing is."""
    kinds = ((name, field.type, old_type(name)) for name, field in found.items() if is_older(table, found))
    wrong = (f"its column {name!r} is of type {own}, not {was}" for name, own, was in kinds if was not in (None, own))
    return next(wrong, "")
