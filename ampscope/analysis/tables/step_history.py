"""The attempts of one optimizer: their history as arrays, and what several rooms ask of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import narwhals as nw
import numpy as np
import numpy.typing as npt

from ampscope.analysis.arrays import BoolArray, Columns, Curve, FloatArray, IntArray, joined_arrays, make_curve
from ampscope.analysis.tables.lazy_tables import Lazy, collect, remembered, stream_columns
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table
from ampscope.trace.schema.tables import details

_COLUMNS = ("optimizer", "step", "loss", "scale", "skipped", "grad_norm", "lr", "averaged")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The attempts of one optimizer in order; NaN where a value was not recorded."""

    optimizer: int
    step: IntArray
    loss: FloatArray
    has_loss: BoolArray
    scale: FloatArray
    skipped: BoolArray
    grad_norm: FloatArray  #: before clipping
    lr: FloatArray
    thinned: BoolArray  #: old attempts that the disk budget has left without a loss, norm and rate of their own

    @property
    def bad_loss(self) -> BoolArray:
        """Attempts whose loss was recorded as not finite."""
        bad: BoolArray = self.has_loss & ~np.isfinite(self.loss)
        return bad

    def scale_at(self, step: int) -> float:
        """The loss scale that an attempt ran with; NaN where it had none, or is not recorded."""
        place = int(np.searchsorted(self.step, step))
        known = place < self.step.size and self.step[place] == step
        return float(self.scale[place]) if known else math.nan

    def before(self, step: int, count: int) -> FloatArray:
        """The finite positive losses of the ``count`` attempts before ``step`` by which the optimizer moved weights."""
        end = int(np.searchsorted(self.step, step))
        losses = self.loss[:end][~(self.skipped | self.thinned)[:end]][-count:]
        kept: FloatArray = losses[np.isfinite(losses) & (losses > 0)]
        return kept


@remembered(Table.STEPS)
def histories(run: Run, rank: int) -> Mapping[int, History]:
    """The history of each optimizer, by number.

    Read batch by batch, and put in order only where they are not: of ten million steps that takes a fifth of the room.
    """
    pieces: dict[int, dict[str, list[npt.NDArray[Any]]]] = {}
    for batch in stream_columns(run.table(Table.STEPS, rank=rank).select(*_COLUMNS)):
        numbers = batch.ints("optimizer")
        for optimizer in np.unique(numbers).tolist():
            own = numbers == optimizer
            for name, values in _arrays(batch if own.all() else batch.where(own)).items():
                pieces.setdefault(optimizer, {}).setdefault(name, []).append(values.copy())  # lets go of the batch
    return {number: History(optimizer=number, **_by_step(pieces.pop(number))) for number in sorted(pieces)}


def _arrays(rows: Columns) -> dict[str, npt.NDArray[Any]]:
    return {
        "step": rows.ints("step"),
        "loss": rows.floats("loss"),
        "has_loss": rows.known("loss"),
        "scale": rows.floats("scale"),
        "skipped": rows.flags("skipped"),
        "grad_norm": rows.floats("grad_norm"),
        "lr": rows.floats("lr"),
        "thinned": rows.known("averaged"),
    }


def _by_step(pieces: dict[str, list[npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    """Each column as one array, by step; pieces are let go of on the way."""
    whole = {name: joined_arrays(pieces.pop(name)) for name in list(pieces)}
    if (np.diff(whole["step"]) < 0).any():
        order = np.argsort(whole["step"], kind="stable")
        whole = {name: whole.pop(name)[order] for name in list(whole)}
    return whole


def steps_of(run: Run, rank: int, optimizer: int) -> Lazy:
    """The step attempts of one optimizer, in the order of the files; `in_order` puts them in that of the steps."""
    return run.table(Table.STEPS, rank=rank).filter(nw.col("optimizer") == optimizer)


def in_order(steps: Lazy) -> Columns:
    """The columns of step attempts, ``step`` among them, by step.

    Read batch by batch and sorted only where they are not in order: of ten million steps that takes half of the room.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    pieces: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in steps.collect_schema().names()}
    for batch in stream_columns(steps):
        for name, values in batch.arrays.items():
            pieces[name].append(values.copy())  # lets go of the batch
    return Columns(_by_step(pieces))


def step_optimizers(run: Run, rank: int) -> tuple[int, ...]:
    """The optimizers that attempted a step, by number."""
    seen = collect(run.table(Table.STEPS, rank=rank).select("optimizer").unique())
    return tuple(sorted(row["optimizer"] for row in seen))


def measured(steps: Columns, column: str) -> tuple[IntArray, FloatArray]:
    """The steps at which ``column`` was recorded, and its values (NaN and infinite ones among them)."""
    known = steps.known(column)
    return steps.ints("step")[known], steps.floats(column)[known]


def log2_curve(steps: Columns) -> Curve:
    """The base-2 logarithm of the loss scale; zero and negative values count as not finite."""
    at, values = measured(steps, "scale")
    positive = values > 0
    logs = np.full(len(values), math.nan)
    logs[positive] = np.log2(values[positive])
    return make_curve(at, logs)


def recorded_rates(run: Run, rank: int, optimizer: int, *which: nw.Expr) -> dict[int, dict[str, Any]]:
    """By step, the rate of each group by its number and name; a step in which all had that of the first is left out.

    Args:
        run: The run.
        rank: One of its ranks.
        optimizer: One of its optimizers.
        which: What holds of the steps that are read, by the columns of the table.

    Raises:
        RunDamaged: a part of the run cannot be read.
    """
    rows = steps_of(run, rank, optimizer).filter(~nw.col("lrs").is_null(), *which)
    return {row["step"]: details(row["lrs"]) for row in collect(rows.select("step", "lrs"))}


def with_group(first: FloatArray, told: Mapping[int, Mapping[str, Any]], group: str) -> FloatArray:
    """A parameter group's rates; where none was told of any but the first group, those of that.

    Args:
        first: The first group's, by place.
        told: By place, the rates that `recorded_rates` gives.
        group: The group, by its number and name.
    """
    found = first.copy()
    for place, rates in told.items():
        rate = rates.get(group)
        found[place] = rate if isinstance(rate, (int, float)) else np.nan
    return found
