"""The tables of a trace: their names, the row type of each, and the Arrow schema that follows from it."""

from __future__ import annotations

import typing
from enum import StrEnum
from functools import cache

import pyarrow as pa

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
    Table.FINDINGS: FindingRow,
    Table.EVENTS: EventRow,
}

#: Tables that the disk budget may shorten, oldest parts first. Everything else is kept.
BULK_TABLES = (Table.OPS, Table.EDGES, Table.GRADS)


@cache
def arrow_schema(table: Table) -> pa.Schema:
    """The Arrow schema of ``table``, derived from its row type."""
    annotations = typing.get_type_hints(ROW_TYPES[table], include_extras=True)
    return pa.schema([arrow_field(name, annotation) for name, annotation in annotations.items()])
