"""Questions about the attempts of one optimizer that several rooms ask."""

from __future__ import annotations

import math

import narwhals as nw
import numpy as np

from ampscope.analysis.numerics.arrays import Columns, FloatArray, IntArray
from ampscope.analysis.numerics.curve import Curve, make_curve
from ampscope.analysis.tables.lazy_tables import Lazy, collect, rank_table
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table


def steps_of(run: Run, rank: int, optimizer: int) -> Lazy:
    """The step attempts of one optimizer, in order."""
    return rank_table(run, Table.STEPS, rank).filter(nw.col("optimizer") == optimizer).sort("step")


def step_optimizers(run: Run, rank: int) -> tuple[int, ...]:
    """The optimizers that attempted a step, by number."""
    seen = collect(rank_table(run, Table.STEPS, rank).select("optimizer").unique())
    return tuple(sorted(row["optimizer"] for row in seen))


def measured(steps: Columns, column: str) -> tuple[IntArray, FloatArray]:
    """The steps at which ``column`` was recorded, and its values (NaN and infinite ones among them)."""
    known = steps.known(column)
    return steps.ints("step")[known], steps.floats(column)[known]


def log2_curve(steps: Columns, column: str = "scale") -> Curve:
    """The base-2 logarithm of a positive column; zero and negative values count as not finite."""
    at, values = measured(steps, column)
    positive = values > 0
    logs = np.full(len(values), math.nan)
    logs[positive] = np.log2(values[positive])
    return make_curve(at, logs)
