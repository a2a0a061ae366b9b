"""Many runs at a glance: what each is, how far it came and what was recorded against it, without diagnosing any."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from ampscope.analysis.numerics.curve import Curve
from ampscope.analysis.overview.pulse import finite
from ampscope.errors import RunError
from ampscope.trace.files.layout import ranks
from ampscope.trace.manifest import read_manifest
from ampscope.trace.read.find import told_name
from ampscope.trace.read.status import status_of
from ampscope.trace.read.table_scan import Scan
from ampscope.trace.schema import Table

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
    """A few rows from the first to the newest."""
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
