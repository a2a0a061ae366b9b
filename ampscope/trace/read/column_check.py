"""Whether a file holds a table of the trace: its columns, their types, and no null where the schema allows none."""

from __future__ import annotations

import pyarrow as pa

from ampscope.trace.read.older_versions import columns_added, is_older, old_type
from ampscope.trace.schema import Table, arrow_schema

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
