"""The learning rates of parameter groups that differ from that of the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import narwhals as nw
import numpy as np

from ampscope.analysis.numerics.arrays import FloatArray
from ampscope.analysis.overview.last_good.good_steps import GoodSteps
from ampscope.analysis.tables.recorded_rates import recorded_rates
from ampscope.trace.read.run import Run


class GroupRate(NamedTuple):
    """A further group's learning rate."""

    name: str  #: the group's own, or its number
    told: str  #: ``parameter group head``, ``parameter group 1 (counted from 0)``
    window: FloatArray  #: in the attempts of `GoodSteps.window`; NaN where it was not recorded
    history: Callable[[], FloatArray]  #: likewise in those of `GoodSteps.history`


def group_rates(run: Run, rank: int, good: GoodSteps) -> Iterator[GroupRate]:
    """The further groups that had a rate of their own in a step of the window."""
    steps = good.window.ints("step")
    rates = _recorded(run, rank, good, int(steps[0]), int(steps[-1]))
    groups = dict.fromkeys(group for told in rates.values() for group in told)
    for group in [each for each in groups if each.partition(" ")[0] != "0"]:
        number, _, own = group.partition(" ")
        yield GroupRate(
            name=own or number,
            told=f"parameter group {own or f'{number} (counted from 0)'}",
            window=_filled(good.window.floats("lr"), steps.tolist(), rates, group),
            history=partial(_history, run, rank, good, group),
        )


def _history(run: Run, rank: int, good: GoodSteps, group: str) -> FloatArray:
    """Only asked for where a rate has moved: of a long run that takes a while."""
    steps = good.history.step
    rates = _recorded(run, rank, good, int(steps[0]), good.until)
    return _filled(good.history.lr, steps.tolist(), rates, group)


def _recorded(run: Run, rank: int, good: GoodSteps, first: int, last: int) -> dict[int, dict[str, object]]:
    """By step, the rates of all groups, where they were not the same."""
    return recorded_rates(run, rank, good.history.optimizer, nw.col("step") >= first, nw.col("step") <= last)


def _filled(first: FloatArray, steps: list[int], rates: dict[int, dict[str, object]], group: str) -> FloatArray:
    """A group's rates, where none was told of its own those of the first group."""
    found = first.copy()
    for place, step in enumerate(steps):
        told = rates.get(step)
        if told is not None:
            rate = told.get(group)
            found[place] = rate if isinstance(rate, (int, float)) else np.nan
    return found
