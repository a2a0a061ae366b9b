"""The tables of a trace have names, row types, Arrow schemas, meanings, and some columns that hold JSON."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import Any

import pyarrow as pa

from ampscope.trace.schema.rows import (
    AuditOpRow,
    AuditRow,
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
    arrow_field,
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


@cache
def field_comments(described: type) -> Mapping[str, str]:
    """The comments behind the fields of a class, or the members of an enumeration, and what goes on below them.

    Args:
        described: The class; its bases are not looked at.

    Returns:
        By field, in their order; empty where one has none.
    """
    text = textwrap.dedent(inspect.getsource(described))
    [definition] = ast.parse(text).body
    assert isinstance(definition, ast.ClassDef)
    lines = text.splitlines()
    return {name: _comment(lines, last) for name, last in _fields(definition)}


@cache
def column_meanings() -> Mapping[Table, Mapping[str, str]]:
    """Returns the meaning of each column of each table.

    One without a comment means what the first column of that name means; a field that is itself a row type stands for
    the columns of that type.
    """
    first: dict[str, str] = {}
    found: dict[Table, dict[str, str]] = {}
    for table, row_type in ROW_TYPES.items():
        own = dict(_flat(row_type))
        found[table] = {name: own.get(name) or first.get(name, "") for name in arrow_schema(table).names}
        first |= {name: text for name, text in own.items() if text and name not in first}
    return found


def _flat(row_type: type) -> Iterator[tuple[str, str]]:
    types = typing.get_type_hints(row_type)
    for name, text in field_comments(row_type).items():
        yield from _flat(types[name]) if hasattr(types[name], "_fields") else [(name, text)]


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    """The fields of a class, each with the number of its last line."""
    for item in node.body:
        target: ast.expr | None = item.target if isinstance(item, ast.AnnAssign) else None
        if isinstance(item, ast.Assign):
            (target,) = item.targets
        if isinstance(target, ast.Name):
            yield target.id, item.end_lineno or item.lineno


def _comment(lines: list[str], last: int) -> str:
    """The comment at the end of the line with number ``last``, and the lines that go on with it."""
    parts = [lines[last - 1].partition("#:")[2]]
    for line in lines[last:]:
        if not parts[0] or not line.lstrip().startswith("#:"):
            break
        parts.append(line.partition("#:")[2])
    return " ".join(part.strip() for part in parts)


def details(text: str) -> dict[str, Any]:
    """The object that ``text`` is; empty where a damaged trace holds something else, which then says nothing."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def names(text: str, key: str) -> tuple[str, ...]:
    """The list of texts under ``key`` of the JSON object in ``text``; empty where there is no such list."""
    found = details(text).get(key)
    return tuple(str(each) for each in found) if isinstance(found, list) else ()
