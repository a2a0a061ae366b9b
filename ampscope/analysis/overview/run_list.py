"""Many runs at a glance: whether each is alive, how far it came and what was recorded against it, none diagnosed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np
import pyarrow as pa

from ampscope.analysis.arrays import Curve
from ampscope.analysis.tables.lazy_tables import Lazy, collect, first_rank
from ampscope.errors import RunError
from ampscope.trace.files.layout import ranks
from ampscope.trace.manifest import read_manifest
from ampscope.trace.read.find import told_name
from ampscope.trace.read.run import Run, status_of
from ampscope.trace.read.table_scan import Scan
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
    steps = _only(run.table(Table.STEPS, rank=rank).select(*last, mean, traced, nonfinite))
    incidents, findings = (
        _only(run.table(each, rank=rank).select(*last)) for each in (Table.INCIDENTS, Table.FINDINGS)
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


#: Rows of a column that are kept for a small picture, less one.
_POINTS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in a list. Times are unix times in seconds; what could not be read is empty, and `problem` says why."""

    path: Path
    name: str = ""
    model: str = ""
    device: str = ""
    tags: tuple[str, ...] = ()
    status: str = ""  #: ``open``, ``closed`` or ``interrupted``
    created: float = 0.0
    last_time: float | None = None  #: end of the newest step
    steps: int = 0  #: optimizer step attempts of the first rank
    skipped: int = 0
    incidents: int = 0  #: rows of the rank with the most, harmless ones among them; what only the diagnosis sees is not
    findings: int = 0
    loss: Curve = field(default_factory=Curve)  #: of the first rank, at a few steps: enough for a small picture
    scale: Curve = field(default_factory=Curve)  #: likewise, the base-2 logarithm of the loss scale
    problem: str = ""

    @property
    def duration(self) -> float | None:
        """Seconds from the start to the newest step; None before the first."""
        return None if self.last_time is None else max(0.0, self.last_time - self.created)

    @property
    def skipped_share(self) -> float | None:
        """Skipped attempts as a share of all attempts."""
        return self.skipped / self.steps if self.steps else None

    def matches(self, search: str, *also: str) -> bool:
        """Whether every word of ``search`` occurs in its path, name, model, device, tags or status, or in ``also``."""
        own = (str(self.path), self.name, self.model, self.device, self.status, *self.tags)
        text = " ".join((*own, *also)).casefold()
        return all(word in text for word in search.casefold().split())


def run_summary(path: Path) -> RunSummary:
    """The run in ``path``; one that cannot be read says so in its `problem`."""
    try:
        return _summary(path)
    except RunError as error:
        return RunSummary(path=path, name=told_name(path), problem=str(error))


def run_summaries(paths: Iterable[Path]) -> tuple[RunSummary, ...]:
    """The runs in ``paths``, in that order."""
    return tuple(map(run_summary, paths))


def _summary(path: Path) -> RunSummary:
    manifest = read_manifest(path)
    scan, writers = Scan(path), ranks(path) or [0]
    steps = scan.read(Table.STEPS, writers[0], ("step", "time", "skipped", "loss", "scale"))
    few = _few(steps)
    return RunSummary(
        path=path,
        name=told_name(path, manifest.name),
        model=manifest.model,
        device=manifest.device,
        tags=manifest.tags,
        status=status_of(path, manifest),
        created=manifest.created,
        last_time=finite(steps["time"][-1].as_py()) if steps.num_rows else None,
        steps=steps.num_rows,
        skipped=len(steps["skipped"].filter(steps["skipped"])),
        incidents=max(scan.count(Table.INCIDENTS, each) for each in writers),
        loss=_curve(few, "loss"),
        scale=_curve(few, "scale"),
        findings=max(scan.count(Table.FINDINGS, each) for each in writers),
    )


def _few(steps: pa.Table) -> pa.Table:
    if not steps.num_rows:
        return steps
    picked = np.unique(np.linspace(0, steps.num_rows - 1, _POINTS + 1).round().astype(np.int64))
    # made of its bytes: of a list, or of numpy's array, pyarrow asks pandas, which takes long to load
    return steps.take(pa.Array.from_buffers(pa.int64(), len(picked), [None, pa.py_buffer(picked)]))


def _curve(few: pa.Table, name: str) -> Curve:
    """A column by step; of the scale its base-2 logarithm."""
    rows = zip(few["step"].to_pylist(), few[name].to_pylist(), strict=True)
    known = {step: number for step, number in rows if number is not None}
    drawn = {step: number for step, number in known.items() if math.isfinite(number) and (name == "loss" or number > 0)}
    values = drawn.values() if name == "loss" else map(math.log2, drawn.values())
    bad = tuple(known.keys() - drawn.keys())
    return Curve(steps=tuple(drawn), values=tuple(values), nonfinite=bad, nonfinite_count=len(bad))
