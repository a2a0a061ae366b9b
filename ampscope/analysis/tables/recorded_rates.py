"""The learning rates of all parameter groups of an optimizer, in steps in which they were not the same."""

from __future__ import annotations

from typing import Any

import narwhals as nw

from ampscope.analysis.tables.lazy_tables import collect
from ampscope.analysis.tables.step_queries import steps_of
from ampscope.trace.json_columns import details
from ampscope.trace.read.run import Run


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
