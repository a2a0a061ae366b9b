"""The step history of one optimizer as arrays: what the rules that look across steps work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ampscope.analysis.numerics.arrays import BoolArray, Columns, FloatArray, IntArray
from ampscope.analysis.tables.lazy_tables import rank_table, stream_columns
from ampscope.trace.read.run import Run
from ampscope.trace.read.table_folders import Stamp
from ampscope.trace.schema import Table

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
