"""The steps before an incident: which of them went well, and which were calm besides."""

from __future__ import annotations

from dataclasses import dataclass

import narwhals as nw
import numpy as np

from ampscope.analysis.numerics.arrays import BoolArray, Columns, FloatArray
from ampscope.analysis.tables.lazy_tables import collect, rank_table
from ampscope.analysis.tables.step_history import History, in_order, steps_of
from ampscope.trace.read.run import Run
from ampscope.trace.schema import EventKind, Table

#: Attempts before an incident that are looked at one by one.
WINDOW = 96
#: A good step was calm if its loss, and its gradient norm, were at most this many times the largest
CALM = {"loss": 2.0, "grad_norm": 4.0}
#: of this many calm ones before it. Where so many in a row are above, that is how it is from then on.
BEFORE = 20
#: Calm steps, of fewer than which nothing is known of what is usual.
LEAST = 3
_COLUMNS = ("step", "segment", "loss", "grad_norm", "scale", "lr", "skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodSteps:
    """What went well before a step."""

    until: int  #: the step that went wrong
    last: int  #: the newest that went well
    calm: int  #: the newest that was calm
    window: Columns  #: the attempts up to ``until``, it included, in order
    good: BoolArray  #: which of them went well
    history: History
    good_history: BoolArray  #: which of all attempts before ``until`` went well

    def is_good(self, step: int) -> bool:
        """Whether a step went well, and is not after the newest that was calm."""
        place = int(np.searchsorted(self.history.step, step))
        inside = step <= self.calm and place < self.good_history.size
        return bool(inside and self.history.step[place] == step and self.good_history[place])

    def place(self, step: int) -> int:
        """Where a step is in the window; its end for one after it."""
        return int(np.searchsorted(self.window.ints("step"), step))


def good_steps(run: Run, rank: int, history: History, until: int) -> GoodSteps | None:
    """The steps before ``until``; None where none of them went well.

    Args:
        run: The run.
        rank: One of its ranks.
        history: The steps of an optimizer.
        until: One of them.
    """
    end = int(np.searchsorted(history.step, until))
    incidents = rank_table(run, Table.INCIDENTS, rank).filter(
        nw.col("optimizer") == history.optimizer, nw.col("step") < until
    )
    wrong = [row["step"] for row in collect(incidents.select("step").unique())]
    wrong += [row.step for row in run.rows(Table.EVENTS, rank=rank, kind=EventKind.SPIKE)]
    good = ~history.skipped[:end] & ~history.bad_loss[:end] & ~np.isin(history.step[:end], wrong)
    found = np.flatnonzero(good)
    if not found.size:
        return None
    first = int(history.step[max(0, int(found[-1]) - WINDOW)])
    rows = steps_of(run, rank, history.optimizer).filter(nw.col("step") >= first, nw.col("step") <= until)
    window = in_order(rows.select(*_COLUMNS))
    steps = window.ints("step")
    well = np.isin(steps, history.step[:end][good]) & ~window.bad("grad_norm")
    if not well.any():
        return None
    calm = _calm(window, well)
    return GoodSteps(
        until=until,
        last=int(steps[well][-1]),
        calm=int(steps[calm][-1]),
        window=window,
        good=well,
        history=history,
        good_history=good,
    )


def _calm(window: Columns, good: BoolArray) -> BoolArray:
    """Which good steps were calm."""
    calm = good.copy()
    for name, limit in CALM.items():
        calm &= _below(window.floats(name), good, limit)
    return calm if calm.any() else good


def _below(values: FloatArray, good: BoolArray, limit: float) -> BoolArray:
    """Which of the good values are not far above the largest of those before."""
    found = good.copy()
    before: list[float] = []
    above: list[float] = []
    for place in np.flatnonzero(good & (values > 0)).tolist():
        value = float(values[place])
        if len(before) >= LEAST and value > limit * max(before[-BEFORE:]):
            found[place] = False
            above.append(value)
            if len(above) >= BEFORE:
                before, above = above, []
        else:
            before.append(value)
            above = []
    return found
