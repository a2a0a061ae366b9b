"""How `Run.rows` asks for rows and what it makes of the columns that come."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import duckdb
import pyarrow as pa

from ampscope.errors import RunDamaged
from ampscope.trace.read.column_check import has_null_elements
from ampscope.trace.schema import Table

#: The order in which `Run.rows` gives rows, after the rank.
ORDER: dict[Table, tuple[str, ...]] = {
    Table.STEPS: ("step", "optimizer"),
    Table.SCALER_EVENTS: ("time", "step", "scaler"),
    Table.PARAMS: ("param",),
    Table.GRADS: ("step", "optimizer", "param"),
    Table.SITES: ("site",),
    Table.OPS: ("step", "source", "seq", "out"),
    Table.EDGES: ("step", "source", "seq", "arg"),
    Table.INCIDENTS: ("step", "optimizer", "time"),
    Table.REPLAYS: ("step", "optimizer", "time"),
    Table.FINDINGS: ("step", "time"),
    Table.EVENTS: ("time", "step"),
}


def is_equal(name: str, value: object) -> duckdb.Expression:
    """That a column equals ``value``; None: is null."""
    column = duckdb.ColumnExpression(name)
    if value is None:
        return column.isnull()
    return column == duckdb.ConstantExpression(str(value) if isinstance(value, StrEnum) else value)


def values_of(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column, lists as tuples.

    Raises:
        RunDamaged: a list holds a null.
    """
    values: list[Any] = column.to_pylist()
    if pa.types.is_list(column.type) and has_null_elements(column):
        raise RunDamaged("A table of the run holds lists with nulls, which no AMPscope writes: restore it from a copy.")
    if pa.types.is_list(column.type):  # the row types hold tuples
        return [None if value is None else tuple(value) for value in values]
    return values
