"""Is a run alive: its newest step, how long its steps take, and what has gone wrong in it so far, at little cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import narwhals as nw

from ampscope.analysis.tables.lazy_tables import Lazy, collect, first_rank, rank_table
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table

#: A silence is told once it is this long, seconds, and as many usual steps: saving or evaluating takes a while.
QUIET_S = 60.0
QUIET_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """The newest that is known of a run; times are unix times in seconds."""

    status: str  #: ``open``, ``closed`` or ``interrupted``
    steps: int = 0
    last_step: int | None = None
    last_time: float | None = None
    step_seconds: float | None = None  #: mean duration of a step
    last_traced: int | None = None  #: the newest step whose ops were recorded
    incidents: int = 0
    last_incident: int | None = None  #: the newest incident's step
    findings: int = 0
    last_finding: int | None = None
    nonfinite: int = 0  #: steps whose loss or gradient norm is NaN or infinite

    def silence(self, now: float) -> float | None:
        """Seconds since the newest step; None before the first."""
        return None if self.last_time is None else max(0.0, now - self.last_time)

    def is_overdue(self, now: float) -> bool:
        """Whether the next step should have been heard of long ago."""
        silent = self.silence(now)
        return silent is not None and silent > max(QUIET_S, QUIET_STEPS * (self.step_seconds or 0.0))


def pulse(run: Run, *, rank: int | None = None) -> Pulse:
    """The pulse of ``rank`` (by default the run's first); an empty run has an empty one."""
    rank = first_rank(run) if rank is None else rank
    last = (nw.len().alias("count"), nw.col("step").max().alias("step"), nw.col("time").max().alias("time"))
    traced = nw.when(nw.col("traced") != "").then(nw.col("step")).max().alias("traced")
    mean = nw.col("duration_s").mean().alias("seconds")
    loss, norm = (nw.col(name).is_finite().fill_null(value=True) for name in ("loss", "grad_norm"))
    nonfinite = (~(loss & norm)).cast(nw.Int64).sum().alias("nonfinite")
    steps = _only(rank_table(run, Table.STEPS, rank).select(*last, mean, traced, nonfinite))
    incidents, findings = (
        _only(rank_table(run, each, rank).select(*last)) for each in (Table.INCIDENTS, Table.FINDINGS)
    )
    return Pulse(
        status=run.status,
        steps=steps["count"],
        last_step=steps["step"],
        last_time=finite(steps["time"]),
        step_seconds=finite(steps["seconds"]),
        last_traced=steps["traced"],
        incidents=incidents["count"],
        last_incident=incidents["step"],
        findings=findings["count"],
        last_finding=findings["step"],
        nonfinite=int(steps["nonfinite"] or 0),
    )


def finite(number: float | None) -> float | None:
    """``number`` where it is one: a trace may hold anything."""
    return number if number is not None and math.isfinite(number) else None


def _only(frame: Lazy) -> dict[str, Any]:
    (row,) = collect(frame)
    return row
