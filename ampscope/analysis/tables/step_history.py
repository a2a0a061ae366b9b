"""The step history of one optimizer as arrays: what the rules that look across steps work on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ampscope.analysis.numerics.arrays import BoolArray, FloatArray, IntArray
from ampscope.analysis.tables.lazy_tables import collect_columns, rank_table
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table

_COLUMNS = ("optimizer", "step", "loss", "scale", "skipped", "lr", "averaged")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The attempts of one optimizer in order; NaN where a value was not recorded."""

    optimizer: int
    step: IntArray
    loss: FloatArray
    has_loss: BoolArray
    scale: FloatArray
    skipped: BoolArray
    lr: FloatArray
    thinned: BoolArray  #: old attempts that the disk budget has left without a loss and rate of their own

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


def histories(run: Run, rank: int) -> dict[int, History]:
    """The history of each optimizer, by number."""
    rows = collect_columns(rank_table(run, Table.STEPS, rank).select(*_COLUMNS).sort("optimizer", "step"))
    found = {}
    for optimizer in np.unique(rows.ints("optimizer")).tolist():
        own = rows.where(rows.ints("optimizer") == optimizer)
        found[optimizer] = History(
            optimizer=optimizer,
            step=own.ints("step"),
            loss=own.floats("loss"),
            has_loss=own.known("loss"),
            scale=own.floats("scale"),
            skipped=own.flags("skipped"),
            lr=own.floats("lr"),
            thinned=own.known("averaged"),
        )
    return found
