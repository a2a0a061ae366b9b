"""Skipped steps after which a learning rate moved all the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import narwhals as nw
import numpy as np

from ampscope.analysis.tables.recorded_rates import recorded_rates
from ampscope.analysis.tables.step_history import History
from ampscope.trace.read.run import Run


def moved_after_skips(run: Run, rank: int, history: History) -> Iterator[int]:
    """The skipped steps after which the next attempt has another learning rate, in any parameter group.

    Args:
        run: The run.
        rank: One of its ranks.
        history: The steps of one of that rank's optimizers.
    """
    skips = np.flatnonzero(history.skipped[:-1])
    if not skips.size:
        return
    asked = history.step[np.union1d(skips, skips + 1)].tolist()
    told = recorded_rates(run, rank, history.optimizer, nw.col("step").is_in(asked))
    for place in skips.tolist():
        step, after = (int(each) for each in history.step[place : place + 2])
        was, now = (float(each) for each in history.lr[place : place + 2])
        if _differ(was, now) or _groups_differ(told.get(step), was, told.get(after), now):
            yield step


def _groups_differ(was: Mapping[str, Any] | None, first: float, now: Mapping[str, Any] | None, later: float) -> bool:
    """Whether a group's rate is another; one that is not told is that of the first group."""
    names = dict.fromkeys((*(was or {}), *(now or {})))
    return any(_differ(_rate(was, name, first), _rate(now, name, later)) for name in names)


def _rate(told: Mapping[str, Any] | None, group: str, first: float) -> float:
    rate = first if told is None else told.get(group)
    return float(rate) if isinstance(rate, (int, float)) else math.nan


def _differ(was: float, now: float) -> bool:
    return was != now and not math.isnan(was) and not math.isnan(now)
