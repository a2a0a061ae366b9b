"""The tables of a trace: their names, the row type of each, and the Arrow schema that follows from it."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cache
from typing import Any

import pyarrow as pa

from ampscope.trace.schema.audit_rows import AuditOpRow, AuditRow
from ampscope.trace.schema.column_types import arrow_field
from ampscope.trace.schema.rows import (
    EdgeRow,
    EventRow,
    FindingRow,
    GradRow,
    IncidentRow,
    OpRow,
    ParamRow,
    ReplayRow,
    ScalerEventRow,
    SiteRow,
    Statistics,
    StepRow,
)


class Table(StrEnum):
    """The tables of a trace; the value is the folder's name."""

    STEPS = "steps"
    SCALER_EVENTS = "scaler_events"
    PARAMS = "params"
    GRADS = "grads"
    SITES = "sites"
    OPS = "ops"
    EDGES = "edges"
    INCIDENTS = "incidents"
    REPLAYS = "replays"
    AUDITS = "audits"
    AUDIT_OPS = "audit_ops"
    FINDINGS = "findings"
    EVENTS = "events"


Row = (
    StepRow
    | ScalerEventRow
    | ParamRow
    | GradRow
    | SiteRow
    | OpRow
    | EdgeRow
    | IncidentRow
    | ReplayRow
    | AuditRow
    | AuditOpRow
    | FindingRow
    | EventRow
)

ROW_TYPES: dict[Table, type[Row]] = {
    Table.STEPS: StepRow,
    Table.SCALER_EVENTS: ScalerEventRow,
    Table.PARAMS: ParamRow,
    Table.GRADS: GradRow,
    Table.SITES: SiteRow,
    Table.OPS: OpRow,
    Table.EDGES: EdgeRow,
    Table.INCIDENTS: IncidentRow,
    Table.REPLAYS: ReplayRow,
    Table.AUDITS: AuditRow,
    Table.AUDIT_OPS: AuditOpRow,
    Table.FINDINGS: FindingRow,
    Table.EVENTS: EventRow,
}

#: Tables that the disk budget may shorten, oldest parts first. Everything else is kept.
BULK_TABLES = (Table.OPS, Table.EDGES, Table.GRADS, Table.AUDIT_OPS)
#: Tables that get more rows with each step; the others describe the program, the process or what was found.
GROWING_TABLES = (*BULK_TABLES, Table.STEPS, Table.SCALER_EVENTS, Table.INCIDENTS)


@cache
def arrow_schema(table: Table) -> pa.Schema:
    """The Arrow schema of ``table``, derived from its row type."""
    return pa.schema(list(_arrow_fields(ROW_TYPES[table])))


def _arrow_fields(row_type: type[Any]) -> Iterator[pa.Field]:
    for name, annotation in typing.get_type_hints(row_type, include_extras=True).items():
        if annotation is Statistics:
            yield from _arrow_fields(Statistics)
        else:
            yield arrow_field(name, annotation)


def columns_of(table: Table, rows: Sequence[Row]) -> list[Sequence[Any]]:
    """The values of rows, a sequence for each column of `arrow_schema`.

    Raises:
        ValueError: a row has another length.
        TypeError: a row holds no `Statistics` where its table has them.
    """
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True)) or [()] * len(arrow_schema(table))
    if rows and ROW_TYPES[table] is OpRow:
        columns[-1:] = zip(*columns[-1], strict=True)
    return columns


def rows_of(table: Table, columns: Sequence[Iterable[Any]]) -> list[Any]:
    """The rows that have these values, a sequence for each column of `arrow_schema`."""
    if ROW_TYPES[table] is OpRow:
        own = len(OpRow._fields) - 1
        return list(map(OpRow, *columns[:own], map(Statistics, *columns[own:])))
    return list(map(ROW_TYPES[table], *columns))
