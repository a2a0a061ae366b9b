"""The step history of one optimizer as arrays: what the rules that look across steps work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import narwhals as nw
import numpy as np
from numpy.typing import NDArray

from ampscope.analysis.frames import collect, rank_table
from ampscope.trace.reader import Run
from ampscope.trace.schema import Table

_COLUMNS = ("optimizer", "step", "loss", "scale", "skipped", "lr")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The attempts of one optimizer in order; NaN where a value was not recorded."""

    optimizer: int
    step: NDArray[np.int64]
    loss: NDArray[np.float64]
    has_loss: NDArray[np.bool_]
    scale: NDArray[np.float64]
    skipped: NDArray[np.bool_]
    lr: NDArray[np.float64]

    def before(self, step: int, count: int) -> NDArray[np.float64]:
        """The finite positive losses of the ``count`` attempts before ``step``."""
        end = int(np.searchsorted(self.step, step))
        losses = self.loss[max(0, end - count) : end]
        kept: NDArray[np.float64] = losses[np.isfinite(losses) & (losses > 0)]
        return kept


def histories(run: Run, rank: int) -> dict[int, History]:
    """The history of each optimizer, by number."""
    rows = collect(rank_table(run, Table.STEPS, rank).select(*_COLUMNS)).sort("optimizer", "step")
    found = {}
    for optimizer in sorted(set(rows["optimizer"].to_list())):
        own = rows.filter(nw.col("optimizer") == optimizer)
        found[optimizer] = History(
            optimizer=optimizer,
            step=own["step"].to_numpy().astype(np.int64),
            loss=_floats(own["loss"]),
            has_loss=~own["loss"].is_null().to_numpy().astype(np.bool_),
            scale=_floats(own["scale"]),
            skipped=own["skipped"].to_numpy().astype(np.bool_),
            lr=_floats(own["lr"]),
        )
    return found


def _floats(column: nw.Series[Any]) -> NDArray[np.float64]:
    return column.cast(nw.Float64).to_numpy().astype(np.float64)
