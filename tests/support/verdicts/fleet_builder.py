"""A fleet whose answers are known: two weeks of runs, of which one host's go bad in the second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ampscope.trace.schema import ReplayStatus, Trigger
from ampscope.trace.vocabulary import Cause
from tests.support.trace_builder import START, TraceBuilder

DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Trained:
    """One run of a fleet."""

    day: float = 0.0  #: when it began
    host: str = "node-1"
    device: str = "NVIDIA H100 80GB HBM3"
    torch: str = "2.12.0"
    ranks: int = 1
    world_size: int = 1
    lost: int = 0  #: steps that are skipped after the calibration
    collapses: bool = False
    misuse: bool = False


def build(folder: Path, fleet: list[Trained]) -> Path:
    """Write the runs of a fleet, one below each other folder."""
    for number, trained in enumerate(fleet):
        path = folder / f"day {trained.day:g}" / f"run-{number}"
        for rank in range(trained.ranks):
            _write(path, rank, trained)
    return folder


def _write(path: Path, rank: int, trained: Trained) -> None:
    versions = {"torch": trained.torch, "python": "3.12.1"}
    builder = TraceBuilder(
        path, rank=rank, created=START + trained.day * DAY, host=trained.host, device=trained.device,
        world_size=trained.world_size, versions=versions,
    )  # fmt: skip
    for step in range(40):
        skipped = step < 2 or 25 <= step < 25 + trained.lost
        scale = 2.0 ** (-3 if trained.collapses and step > 30 else 10)
        builder.step(step=step, skipped=skipped, found_inf=skipped, duration_s=36.0, scale=scale)
        if 25 <= step < 25 + trained.lost:
            builder.incident(step=step, trigger=Trigger.NONFINITE_GRADIENT, replay=ReplayStatus.UNAVAILABLE)
    if trained.misuse:
        builder.finding(Cause.MISUSE_CLIP_BEFORE_UNSCALE, step=1)
    builder.close()
