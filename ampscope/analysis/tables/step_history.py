"""The attempts of one optimizer: their history as arrays, and what several rooms ask of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import narwhals as nw
import numpy as np
import numpy.typing as npt

from ampscope.analysis.arrays import BoolArray, Columns, Curve, FloatArray, IntArray, make_curve
from ampscope.analysis.tables.lazy_tables import Lazy, collect, rank_table, stream_columns
from ampscope.trace.read.run import Run
from ampscope.trace.read.table_folders import Stamp
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

    def before(self, step: int, count: int) -> FloatArray:
        """The finite positive losses of the ``count`` attempts before ``step`` by which the optimizer moved weights."""
        end = int(np.searchsorted(self.step, step))
        losses = self.loss[:end][~(self.skipped | self.thinned)[:end]][-count:]
        kept: FloatArray = losses[np.isfinite(losses) & (losses > 0)]
        return kept


def histories(run: Run, rank: int) -> Mapping[int, History]:
    """The history of each optimizer, by number; read once for every state of the table."""
    stamp = run.stamp(Table.STEPS, rank=rank)
    known = _known.setdefault(run, {})
    if rank not in known or known[rank][0] != stamp:
        known[rank] = stamp, _histories(run, rank)
    return known[rank][1]


#: By run and rank.
_known: WeakKeyDictionary[Run, dict[int, tuple[Stamp, Mapping[int, History]]]] = WeakKeyDictionary()


def _histories(run: Run, rank: int) -> Mapping[int, History]:
    """Batch by batch, and put in order only where they are not: of ten million steps that takes a fifth of the room."""
    pieces: dict[int, dict[str, list[npt.NDArray[Any]]]] = {}
    for batch in stream_columns(rank_table(run, Table.STEPS, rank).select(*_COLUMNS)):
        numbers = batch.ints("optimizer")
        for optimizer in np.unique(numbers).tolist():
            own = numbers == optimizer
            for name, values in _arrays(batch if own.all() else batch.where(own)).items():
                pieces.setdefault(optimizer, {}).setdefault(name, []).append(values.copy())  # lets go of the batch
    return {optimizer: _joined(optimizer, pieces.pop(optimizer)) for optimizer in sorted(pieces)}


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


def _joined(optimizer: int, pieces: dict[str, list[npt.NDArray[Any]]]) -> History:
    whole = {name: np.concatenate(pieces.pop(name)) for name in list(pieces)}
    if (np.diff(whole["step"]) < 0).any():
        order = np.argsort(whole["step"], kind="stable")
        whole = {name: whole.pop(name)[order] for name in list(whole)}
    return History(optimizer=optimizer, **whole)


def steps_of(run: Run, rank: int, optimizer: int) -> Lazy:
    """The step attempts of one optimizer, in the order of the files; `in_order` puts them in that of the steps."""
    return rank_table(run, Table.STEPS, rank).filter(nw.col("optimizer") == optimizer)


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
    whole = Columns({name: _one_array(pieces.pop(name)) for name in list(pieces)})
    if not (np.diff(whole.ints("step")) < 0).any():
        return whole
    order = np.argsort(whole.ints("step"), kind="stable")
    return Columns({name: values[order] for name, values in whole.arrays.items()})


def _one_array(pieces: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    if not pieces:
        return np.empty(0)
    if not any(isinstance(piece, np.ma.MaskedArray) for piece in pieces):
        return np.concatenate(pieces)
    masks = [np.ma.getmaskarray(piece) for piece in pieces]
    return np.ma.masked_array(np.concatenate([np.asarray(piece) for piece in pieces]), np.concatenate(masks))


def step_optimizers(run: Run, rank: int) -> tuple[int, ...]:
    """The optimizers that attempted a step, by number."""
    seen = collect(rank_table(run, Table.STEPS, rank).select("optimizer").unique())
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
