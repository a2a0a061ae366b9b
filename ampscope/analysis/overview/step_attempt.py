"""One attempt of an optimizer step: what was recorded of it, and where its ops can be seen."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.tables.lazy_tables import first_rank
from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.trace.read.run import Run
from ampscope.trace.schema import StepRow, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt; null means not recorded."""

    step: int
    optimizer: int
    loss: float | None
    grad_norm: float | None  #: L2, unscaled, before clipping
    scale: float | None  #: loss scale in use
    next_scale: float | None  #: that of the attempt after it
    growth_tracker: int | None
    skipped: bool
    traced: TracedStep | None  #: the execution with its ops, the real one rather than a replay


def attempt(run: Run, step: int, *, optimizer: int | None = None, rank: int | None = None) -> Attempt | None:
    """The attempt ``step`` of ``optimizer`` (by default the first that made it); None where there was none."""
    rank = first_rank(run) if rank is None else rank
    rows = [row for row in run.rows(Table.STEPS, rank=rank, step=step) if optimizer in (None, row.optimizer)]
    if not rows:
        return None
    row = rows[0]
    after = run.rows(Table.STEPS, rank=rank, step=step + 1, optimizer=row.optimizer)
    return Attempt(
        step=step,
        optimizer=row.optimizer,
        loss=row.loss,
        grad_norm=row.grad_norm,
        scale=row.scale,
        next_scale=after[0].scale if after else None,
        growth_tracker=row.growth_tracker,
        skipped=row.skipped,
        traced=_traced(rank, row),
    )


def _traced(rank: int, row: StepRow) -> TracedStep | None:
    """Where its ops are, as far as the step itself tells."""
    return TracedStep(rank=rank, step=row.step, source=row.traced, rows=0) if row.traced else None
