"""The learning rates of parameter groups that move otherwise than that of the first."""

from __future__ import annotations

from dataclasses import dataclass

import narwhals as nw
import numpy as np

from ampscope.analysis.numerics.arrays import FloatArray, IntArray
from ampscope.analysis.numerics.curve import Curve, make_curve
from ampscope.analysis.tables.lazy_tables import collect, collect_expressions
from ampscope.analysis.tables.step_queries import steps_of
from ampscope.trace.json_columns import details
from ampscope.trace.read.run import Run

#: Steps whose rates are read, evenly spaced, and groups that are told.
_MOST_STEPS, _MOST_GROUPS = 20_000, 3
#: How far apart, as a share, the ratios of two rates lie at least where they do not move together.
_APART = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCurve:
    """A further parameter group's learning rate."""

    group: str  #: its own name, or its number, from 0
    lr: Curve


def group_curves(run: Run, rank: int, optimizer: int, steps: IntArray, first: FloatArray) -> tuple[GroupCurve, ...]:
    """The rates that are not that of the first group, times a number that is always the same.

    Args:
        run: The run.
        rank: One of its ranks.
        optimizer: One of its optimizers.
        steps: Its steps, in order.
        first: The first group's rate in each; NaN where it was not recorded.
    """
    rows = steps_of(run, rank, optimizer).filter(~nw.col("lrs").is_null())
    ((count,),) = collect_expressions(rows, "count(*)")
    if not count:
        return ()
    every = -(-count // _MOST_STEPS)
    chosen = rows.filter(nw.col("step") % every == 0).select("step", "lrs")
    places = {step: place for place, step in enumerate(steps.tolist())}  # a run may have grown since
    told = {places[row["step"]]: details(row["lrs"]) for row in collect(chosen) if row["step"] in places}
    kept = steps % every == 0
    steps, first = steps[kept], first[kept]
    names = dict.fromkeys(name for rates in told.values() for name in rates if name.partition(" ")[0] != "0")
    found = []
    for name in names:
        rates = first.copy()
        for place, each in told.items():
            rate = each.get(name)
            rates[place] = rate if isinstance(rate, (int, float)) else np.nan
        if _moves_otherwise(first, rates):
            number, _, own = name.partition(" ")
            known = ~np.isnan(rates)
            found.append(GroupCurve(group=own or number, lr=make_curve(steps[known], rates[known])))
    return tuple(found[:_MOST_GROUPS])


def _moves_otherwise(first: FloatArray, rates: FloatArray) -> bool:
    known = np.isfinite(first) & np.isfinite(rates)
    one, other = first[known], rates[known]
    apart = np.abs(other * one[:1] - other[:1] * one)
    return bool((apart > _APART * np.maximum(np.abs(other * one[:1]), np.abs(other[:1] * one))).any())
