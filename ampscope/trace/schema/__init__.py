"""The one place where a run's record is defined: tables, columns, units and enumerations.

A table is a ``NamedTuple`` row type; its Arrow schema is derived from the annotations, so a column is named exactly
once. Everything that writes or reads a trace goes through these types. Raise `SCHEMA_VERSION` when a column changes
its meaning or disappears, or when rows lie where an older reader would not look; adding a nullable column does not
need it.
"""

from __future__ import annotations

from ampscope.trace.schema.audit_rows import AuditOpRow, AuditRow
from ampscope.trace.schema.enums import (
    COLLECTIVE_LIBRARIES,
    ENTRY_NODES,
    LOSS_CODE,
    SINK_NODES,
    AuditStatus,
    Cast,
    Change,
    CureKind,
    EventKind,
    Form,
    Looked,
    Node,
    Phase,
    ReplayStatus,
    ScalerAction,
    Source,
    StateKind,
    Trial,
    Trigger,
    execution_of,
    said,
    source_of,
)
from ampscope.trace.schema.rows import (
    BLOCK,
    BLOCK_FALLS,
    TOP_VALUES,
    UNMEASURED,
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
from ampscope.trace.schema.tables import (
    BULK_TABLES,
    GROWING_TABLES,
    ROW_TYPES,
    Row,
    Table,
    arrow_schema,
    columns_of,
    rows_of,
)

SCHEMA_VERSION = 3
MANIFEST = "run.json"

__all__ = [
    "BLOCK",
    "BLOCK_FALLS",
    "BULK_TABLES",
    "COLLECTIVE_LIBRARIES",
    "ENTRY_NODES",
    "GROWING_TABLES",
    "LOSS_CODE",
    "MANIFEST",
    "ROW_TYPES",
    "SCHEMA_VERSION",
    "SINK_NODES",
    "TOP_VALUES",
    "UNMEASURED",
    "AuditOpRow",
    "AuditRow",
    "AuditStatus",
    "Cast",
    "Change",
    "CureKind",
    "EdgeRow",
    "EventKind",
    "EventRow",
    "FindingRow",
    "Form",
    "GradRow",
    "IncidentRow",
    "Looked",
    "Node",
    "OpRow",
    "ParamRow",
    "Phase",
    "ReplayRow",
    "ReplayStatus",
    "Row",
    "ScalerAction",
    "ScalerEventRow",
    "SiteRow",
    "Source",
    "StateKind",
    "Statistics",
    "StepRow",
    "Table",
    "Trial",
    "Trigger",
    "arrow_schema",
    "columns_of",
    "execution_of",
    "rows_of",
    "said",
    "source_of",
]
