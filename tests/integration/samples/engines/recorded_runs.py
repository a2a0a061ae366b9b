"""Runs that engines are compared on: the samples, and one that holds what is hard to agree on."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet as pq

from ampscope.trace.schema import Node, Phase, ReplayStatus, ScalerAction, Source, Trigger
from tests.support.trace_builder import TraceBuilder

RANKS, STEPS, SEALED = 3, 48, 32


def hard_run(folder: Path) -> list[TraceBuilder]:
    """A job of three ranks, still being written: sealed parts, one of them of an older writer, and journals.

    One rank parts from its replicas, losses and ranges are null, NaN and infinite, and there are two optimizers.
    """
    for rank in range(RANKS):
        first = TraceBuilder(folder, rank=rank, world_size=RANKS)
        _program(first)
        _steps(first, rank, range(SEALED))
        first.close()
    _as_an_older_writer(folder / "rank=1" / "ops", ["flushed", "top_values", "block_falls"])
    later = [TraceBuilder(folder, rank=rank, world_size=RANKS) for rank in range(RANKS)]
    for rank, builder in enumerate(later):
        _steps(builder, rank, range(SEALED, STEPS))
        builder.leave_open()
    return later


def _program(builder: TraceBuilder) -> None:
    for number in range(2):
        builder.param(f"blocks.{number}.fc.weight")
    for number in range(2):
        builder.site(module=f"blocks.{number}.fc")
        builder.site("aten.mm.default", module=f"blocks.{number}.fc", phase=Phase.BACKWARD)
    builder.site(Node.PARAMETER, name="blocks.0.fc.weight", module="blocks.0.fc", out_dtypes=("float32",))
    builder.site(Node.GRADIENT, name="blocks.0.fc.weight", module="blocks.0.fc", phase=Phase.BACKWARD)


def _steps(builder: TraceBuilder, rank: int, steps: range) -> None:
    for step in steps:
        skipped = step % 11 == 5
        norm = math.inf if skipped else 1.0 + step / 7 + (0.5 if rank == 2 and step > 20 else 0.0)
        loss = {3: None, 5: math.nan, 9: math.inf}.get(step % 12, 4.0 / (1 + step))
        traced = "live" if step % 4 == 0 else ""
        for optimizer in range(2):
            builder.step(
                step=step, optimizer=optimizer, loss=loss, skipped=skipped, found_inf=skipped, traced=traced,
                grad_norm=norm if optimizer == 0 else None, scale=65536.0 / 2 ** (step // 11),
            )  # fmt: skip
        builder.grad(step=step, param=step % 2, max_abs=None if step % 5 == 0 else 10.0**-step, nonfinite=skipped)
        if skipped:
            _incident(builder, rank, step)
        if traced or skipped:
            _ops(builder, step, Source.LIVE if traced else Source.REPLAY)


def _incident(builder: TraceBuilder, rank: int, step: int) -> None:
    replay = ReplayStatus.EXACT if rank == 1 else ReplayStatus.RECEIVED
    builder.incident(step=step, replay=replay, trigger=Trigger.NONFINITE_GRADIENT, bad_params=("blocks.0.fc.weight",))
    builder.scaler_event(ScalerAction.BACKOFF, step=step, scale_after=32768.0)


def _ops(builder: TraceBuilder, step: int, source: str) -> None:
    height = 2.0 ** (step / 5)
    for site in range(6):
        ends = {"min": -height * (site + 1), "max": height * (site + 1), "max_finite": height * (site + 1)}
        if step % 11 == 5 and site == 2:
            ends |= {"max": math.inf, "posinf": 3}
        if step % 16 == 8 and site == 3:
            ends |= {"min": math.nan, "max": math.nan, "max_finite": None, "exp_counts": None, "exp_low": None}
        if step % 8 == 4:
            ends |= {"zeros": None, "subnormals": None, "exp_low": None, "exp_counts": None}
        builder.op(site, step=step, source=source, flushed=site if step % 3 == 0 else None, **ends)
    for seq in range(1, 6):
        builder.edge(seq - 1, seq, step=step, source=source)


def _as_an_older_writer(folder: Path, without: list[str]) -> None:
    """Take columns out of sealed parts, which a writer that did not know them would not have written."""
    for part in folder.glob("*.parquet"):
        pq.write_table(pq.read_table(part).drop_columns(without), part)
