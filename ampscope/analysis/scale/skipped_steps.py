"""The skipped steps one by one, each with the parameters whose gradients tripped it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import narwhals as nw

from ampscope.analysis.tables.lazy_tables import collect, first_rank, rank_table
from ampscope.analysis.tables.step_queries import step_optimizers
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table

#: The newest skips that are told one by one, and parameters that are named of each.
LATEST, NAMED = 2000, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedStep:
    """A step that the scaler skipped."""

    step: int
    scale: float | None
    loss: float | None
    params: tuple[str, ...] = ()  #: the first of those whose gradients were not finite, at most `NAMED`
    tripped: int = 0  #: how many those were; 0 where it was not recorded
    all_params: int = 0  #: parameters of the run


def skipped_steps(run: Run, *, optimizer: int | None = None, rank: int | None = None) -> tuple[SkippedStep, ...]:
    """The newest skips of ``optimizer`` on ``rank`` (by default the run's first), the newest first."""
    rank = first_rank(run) if rank is None else rank
    chosen = next(iter(step_optimizers(run, rank)), 0) if optimizer is None else optimizer
    mine = nw.col("optimizer") == chosen
    skips = rank_table(run, Table.STEPS, rank).filter(mine & nw.col("skipped")).select("step", "scale", "loss")
    rows = collect(skips.sort("step", descending=True).head(LATEST))
    if not rows:
        return ()
    params = {row.param: row.name for row in run.rows(Table.PARAMS, rank=rank) if row.kind == "parameter"}
    tripped = {**_of_incidents(run, rank, chosen), **_of_gradients(run, rank, chosen, rows[-1]["step"], params)}
    return tuple(_skipped(row, tripped.get(row["step"], []), len(params)) for row in rows)


def _skipped(row: dict[str, Any], tripped: list[str], params: int) -> SkippedStep:
    return SkippedStep(**row, params=tuple(tripped[:NAMED]), tripped=len(tripped), all_params=params)


def _of_gradients(run: Run, rank: int, optimizer: int, first: int, params: dict[int, str]) -> dict[int, list[str]]:
    """By step, the parameters whose gradients were recorded as not finite."""
    mine = (nw.col("optimizer") == optimizer) & (nw.col("step") >= first) & nw.col("nonfinite")
    bad = rank_table(run, Table.GRADS, rank).filter(mine).select("step", "param").sort("step", "param")
    found: dict[int, list[str]] = defaultdict(list)
    for row in collect(bad):
        found[row["step"]].append(params.get(row["param"], ""))
    return found


def _of_incidents(run: Run, rank: int, optimizer: int) -> dict[int, list[str]]:
    """By step, the parameters that incidents name."""
    rows = run.rows(Table.INCIDENTS, rank=rank, optimizer=optimizer)
    return {row.step: list(row.bad_params) for row in rows}
