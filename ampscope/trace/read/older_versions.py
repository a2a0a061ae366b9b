"""Rows that an older schema version wrote, as rows of today's; nothing else knows that there were other versions.

Version 1 kept in text what has columns since version 2:

- ``findings.evidence`` named the form of a mistake in English, under ``what``;
- ``replays.conversions`` was a list of texts like ``train.py:8 code``;
- ``incidents.evidence`` held the names of parameters under ``params``, and ``over_budget``.

Version 3 has the same columns as version 2. Its parts may hold the rows of several numbers, and thinned ones, under
names that a reader of version 2 passes over: it would show a run without them.

A file is told by its columns, not by the manifest: a run that was begun under one version and resumed under another
holds files of both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import pyarrow as pa

from ampscope.trace.files.arrow_arrays import to_array
from ampscope.trace.schema import Table, arrow_schema
from ampscope.trace.schema.tables import details, names
from ampscope.trace.vocabulary import MistakeForm

_Row = dict[str, Any]


class _Upgrade(NamedTuple):
    """How one table's rows of version 1 become rows of version 2."""

    old: str  #: a column that the files of version 1 have
    new: str  #: a column that they lack
    columns_of: Callable[[_Row], _Row]  #: the columns of a row that are new or say something else


#: Tables whose columns have changed. Their rows are loaded to be upgraded, so no `BULK_TABLES` among them.
CHANGED = frozenset({Table.FINDINGS, Table.REPLAYS, Table.INCIDENTS})


def is_older(table: Table, columns: Collection[str]) -> bool:
    """Whether a file of ``table`` with these columns has to be `upgraded`."""
    upgrade = _UPGRADES.get(table)
    return upgrade is not None and upgrade.old in columns and upgrade.new not in columns


def columns_added(table: Table) -> frozenset[str]:
    """The columns of ``table`` that an older file of it lacks, and gets when it is `upgraded`."""
    return _ADDED.get(table, frozenset())


def old_type(column: str) -> pa.DataType | None:
    """The type of a column that only older versions have; None of others."""
    return pa.list_(pa.string()) if column == "conversions" else None


def upgraded(table: Table, rows: pa.Table) -> pa.Table:
    """Whole rows of any version as rows of today's; columns that no version has had are as they were."""
    if not is_older(table, rows.column_names):
        return rows
    columns = rows.to_pydict()
    changed = [_UPGRADES[table].columns_of(row) for row in rows.to_pylist()]
    columns |= {name: [row[name] for row in changed] for name in (changed[0] if changed else ())}
    fields = [field for field in arrow_schema(table) if field.name in columns]
    return pa.table([to_array(columns[field.name], field.type) for field in fields], schema=pa.schema(fields))


_FORMS = {
    "stepped past the scaler": MistakeForm.STEPPED_PAST_SCALER,
    "unscaled twice": MistakeForm.UNSCALED_BY_HAND,
    "loss of scaled gradients": MistakeForm.LOSS_OF_SCALED_GRADIENTS,
    "decision": MistakeForm.DECISION_ON_SCALED,
    "unscale each time": MistakeForm.UNSCALE_EACH_MICROBATCH,
    "unscale twice": MistakeForm.UNSCALE_TWICE,
    "update missing": MistakeForm.UPDATE_MISSING,
    "nothing to update": MistakeForm.NOTHING_TO_UPDATE,
    "update in between": MistakeForm.UPDATE_IN_BETWEEN,
    "another scaler": MistakeForm.ANOTHER_SCALER,
    "loss not scaled": MistakeForm.LOSS_NOT_SCALED,
    "no scaler": MistakeForm.NO_SCALER,
}


def _finding(row: _Row) -> _Row:
    evidence = details(row["evidence"])
    form = _FORMS.get(str(evidence.get("what")))
    if form is None:
        return {"form": "", "evidence": row["evidence"]}
    del evidence["what"]
    return {"form": form.value, "evidence": json.dumps(evidence)}


_CODE_LINE = re.compile(r"(.*?):(\d+)(?: (.*))?", re.DOTALL)


def _replay(row: _Row) -> _Row:
    if row["conversions"] is None:
        return dict.fromkeys(("conversion_files", "conversion_lines", "conversion_codes"))
    lines = [match for text in row["conversions"] if text and (match := _CODE_LINE.fullmatch(text))]
    return {
        "conversion_files": [match[1] for match in lines],
        "conversion_lines": [int(match[2]) for match in lines],
        "conversion_codes": [match[3] or "" for match in lines],
    }


def _incident(row: _Row) -> _Row:
    evidence = details(row["evidence"])
    found = {"bad_params": names(row["evidence"], "params"), "over_budget": bool(evidence.pop("over_budget", False))}
    moved = evidence.pop("params", None) is not None or found["over_budget"]
    return {**found, "evidence": json.dumps(evidence) if moved else row["evidence"]}


_UPGRADES: dict[Table, _Upgrade] = {
    Table.FINDINGS: _Upgrade(old="evidence", new="form", columns_of=_finding),
    Table.REPLAYS: _Upgrade(old="conversions", new="conversion_files", columns_of=_replay),
    Table.INCIDENTS: _Upgrade(old="evidence", new="bad_params", columns_of=_incident),
}

_ADDED: dict[Table, frozenset[str]] = {
    Table.FINDINGS: frozenset({"form"}),
    Table.REPLAYS: frozenset({"conversion_files", "conversion_lines", "conversion_codes"}),
    Table.INCIDENTS: frozenset({"bad_params", "over_budget"}),
}
