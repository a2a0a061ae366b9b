"""Questions about the attempts of one optimizer that several rooms ask."""

from __future__ import annotations

import math
from typing import Any

import narwhals as nw
import numpy as np
import numpy.typing as npt

from ampscope.analysis.numerics.arrays import Columns, FloatArray, IntArray
from ampscope.analysis.numerics.curve import Curve, make_curve
from ampscope.analysis.tables.lazy_tables import Lazy, collect, rank_table, stream_columns
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table


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
    whole = Columns({name: _joined(pieces.pop(name)) for name in list(pieces)})
    if not (np.diff(whole.ints("step")) < 0).any():
        return whole
    order = np.argsort(whole.ints("step"), kind="stable")
    return Columns({name: values[order] for name, values in whole.arrays.items()})


def _joined(pieces: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
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
