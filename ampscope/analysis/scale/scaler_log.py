"""The scaler events of one optimizer: changes one by one, routine calls told once for each line of code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import narwhals as nw

from ampscope.analysis.results import SourceLine
from ampscope.analysis.tables.lazy_tables import Lazy, collect, rank_table
from ampscope.trace.json_columns import details
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ScalerAction, ScalerEventRow, Table

#: Events that a loop makes at every step.
ROUTINE = (ScalerAction.UNSCALE, ScalerAction.SKIP)
_IS_ROUTINE = nw.col("action").is_in([str(action) for action in ROUTINE])


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerSettings:
    """The constructor's arguments, where the trace tells them."""

    init_scale: float | None = None
    growth_factor: float | None = None
    backoff_factor: float | None = None
    growth_interval: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleEvent:
    """One change of the scaler, and the user's line that made it."""

    step: int
    action: str  #: `ScalerAction`
    before: float | None
    after: float | None
    detail: str  #: arguments in words, ``growth_interval = 500``; may be empty
    source: SourceLine | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerCall:
    """What a loop repeats, told once for each line."""

    action: str  #: `ScalerAction`
    count: int
    first_step: int
    last_step: int
    source: SourceLine | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerLog:
    """The events of the scaler that serves one optimizer."""

    changes: tuple[ScalerEventRow, ...]
    calls: tuple[ScalerCall, ...]
    scalers: int  #: number of scalers in the run


def scaler_log(run: Run, optimizer: int, rank: int) -> ScalerLog:
    """The events that concern ``optimizer``; where the trace does not tell whose scaler it is, those of all."""
    frame, scalers = _events(run, optimizer, rank)
    return ScalerLog(
        changes=_changes(frame.filter(~_IS_ROUTINE)), calls=_calls(frame.filter(_IS_ROUTINE)), scalers=scalers
    )


def changes_since(run: Run, optimizer: int, rank: int, step: int) -> tuple[ScalerEventRow, ...]:
    """The newest of a log's changes: those in ``step`` and later."""
    frame, _ = _events(run, optimizer, rank)
    return _changes(frame.filter(~_IS_ROUTINE, nw.col("step") >= step))


def scaler_settings(run: Run, optimizer: int, rank: int) -> ScalerSettings:
    """The arguments with which the scaler of ``optimizer`` was made, without the rest of its log."""
    made = run.rows(Table.SCALER_EVENTS, rank=rank, action=ScalerAction.INIT)
    if len({row.scaler for row in made}) > 1:
        frame, _ = _events(run, optimizer, rank)
        made = list(_changes(frame.filter(nw.col("action") == str(ScalerAction.INIT))))
    return settings_of(sorted(made, key=lambda row: (row.time, row.step)))


def settings_of(changes: Sequence[ScalerEventRow]) -> ScalerSettings:
    """The arguments of the first constructor call among ``changes``."""
    made = [arguments(row.detail) for row in changes if row.action == ScalerAction.INIT]
    known = made[0] if made else {}
    return ScalerSettings(**{name: _number(known.get(name)) for name in ScalerSettings.__dataclass_fields__})


def scale_event(row: ScalerEventRow) -> ScaleEvent:
    """``row`` with its arguments in words."""
    return ScaleEvent(
        step=row.step,
        action=row.action,
        before=row.scale_before,
        after=row.scale_after,
        detail=", ".join(f"{name} = {value}" for name, value in arguments(row.detail).items()),
        source=_source(row.file, row.line, row.function, row.code),
    )


def arguments(detail: str) -> dict[str, object]:
    """The JSON object in ``detail``; anything else is no arguments."""
    return details(detail) if detail else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _events(run: Run, optimizer: int, rank: int) -> tuple[Lazy, int]:
    """The events that concern ``optimizer``, and the number of scalers in the run."""
    frame = rank_table(run, Table.SCALER_EVENTS, rank)
    owners = collect(frame.select("scaler", "optimizer").unique())
    mine = [row["scaler"] for row in owners if row["optimizer"] == optimizer]
    if mine:
        frame = frame.filter(nw.col("scaler").is_in(mine))
    own = nw.col("optimizer").is_null() | (nw.col("optimizer") == optimizer)
    return frame.filter(own), len({row["scaler"] for row in owners})


def _changes(frame: Lazy) -> tuple[ScalerEventRow, ...]:
    rows = collect(frame.select(*ScalerEventRow._fields).sort("time", "step"))
    return tuple(ScalerEventRow(**row) for row in rows)


def _calls(frame: Lazy) -> tuple[ScalerCall, ...]:
    spans = (nw.len().alias("count"), nw.col("step").min().alias("first"), nw.col("step").max().alias("last"))
    grouped = frame.group_by("action", "file", "line", "function", "code").agg(*spans)
    return tuple(map(_call, collect(grouped.sort("first", "file", "line"))))


def _call(row: dict[str, Any]) -> ScalerCall:
    return ScalerCall(
        action=str(row["action"]),
        count=int(row["count"]),
        first_step=int(row["first"]),
        last_step=int(row["last"]),
        source=_source(str(row["file"]), int(row["line"]), str(row["function"]), str(row["code"])),
    )


def _source(file: str, line: int, function: str, code: str) -> SourceLine | None:
    return SourceLine(file=file, line=line, function=function, code=code) if file else None
