"""Tells the skips by which a loss scale calibrates itself from those that are a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.trace.schema import StepRow
from ampscope.trace.vocabulary import Cause

#: A scale halved this often in a row without a single good step has gone from 2**16 below 2**-4: no calibration.
LONGEST_CALIBRATION = 20
#: A loss scale below 1 shrinks the gradients it exists to enlarge.
LOWEST_USEFUL_SCALE = 1.0


@dataclass(frozen=True, slots=True)
class SkipRun:
    """Consecutive skipped steps of one optimizer."""

    first: int
    last: int
    lowest_scale: float
    recovered: bool  #: a good step followed
    had_trained: bool  #: a good step came before

    @property
    def count(self) -> int:
        """How many steps were skipped."""
        return self.last - self.first + 1

    @property
    def calibrates(self) -> bool:
        """Whether this looks like the scale finding its place rather than collapsing."""
        return self.count <= LONGEST_CALIBRATION and self.lowest_scale >= LOWEST_USEFUL_SCALE

    @property
    def benign_cause(self) -> Cause:
        """What to call it when it is harmless."""
        return Cause.BENIGN_PERIODIC_GROWTH if self.had_trained else Cause.BENIGN_INITIAL_CALIBRATION


def skip_runs(steps: Sequence[StepRow]) -> list[SkipRun]:
    """The runs of skipped steps among the attempts of one optimizer, in order."""
    found: list[SkipRun] = []
    trained, run = False, list[StepRow]()
    for row in steps:
        if row.skipped:
            run.append(row)
            continue
        if run:
            found.append(_skip_run(run, recovered=True, trained=trained))
        trained, run = True, []
    if run:
        found.append(_skip_run(run, recovered=False, trained=trained))
    return found


def _skip_run(rows: Sequence[StepRow], *, recovered: bool, trained: bool) -> SkipRun:
    lowest = min((row.scale for row in rows if row.scale is not None), default=1.0)
    return SkipRun(rows[0].step, rows[-1].step, lowest, recovered, trained)
