"""Tells the skips by which a loss scale calibrates itself from those that are a failure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ampscope.analysis.tables.step_history import History
from ampscope.trace.vocabulary import Cause

#: A scale halved this often in a row without a single good step has gone from 2**16 below 2**-4: no calibration.
LONGEST_CALIBRATION = 20
#: A scale that never grew is still finding its place this many attempts into the run.
CALIBRATION_STEPS = 20
#: A loss scale below 1 shrinks the gradients it exists to enlarge.
LOWEST_USEFUL_SCALE = 1.0


@dataclass(frozen=True, slots=True)
class SkipRun:
    """Consecutive skipped steps of one optimizer."""

    position: int  #: how many attempts came before
    first: int
    last: int
    lowest_scale: float
    recovered: bool  #: a good step followed
    had_trained: bool  #: a good step came before
    had_grown: bool  #: the scale had been raised since the skip before

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
        if self.had_grown:
            return Cause.BENIGN_PERIODIC_GROWTH
        early = not self.had_trained or self.position < CALIBRATION_STEPS
        return Cause.BENIGN_INITIAL_CALIBRATION if early else Cause.BENIGN_SCALE_ADJUSTMENT


def skip_runs(history: History) -> list[SkipRun]:
    """The runs of skipped steps among the attempts of one optimizer, in order."""
    padded = np.concatenate(([False], history.skipped, [False]))
    starts, ends = np.flatnonzero(~padded[:-1] & padded[1:]), np.flatnonzero(padded[:-1] & ~padded[1:])
    return [_skip_run(history, int(start), int(end)) for start, end in zip(starts, ends, strict=True)]


def _skip_run(history: History, start: int, end: int) -> SkipRun:
    """The skips at positions ``start`` to ``end`` (excluded)."""
    scales = history.scale[start:end]
    known = scales[~np.isnan(scales)]
    since_last_skip = int(np.max(np.flatnonzero(history.skipped[:start]), initial=-1)) + 1
    good = history.scale[since_last_skip : start + 1]
    return SkipRun(
        position=start,
        first=int(history.step[start]),
        last=int(history.step[end - 1]),
        lowest_scale=float(known.min()) if known.size else 1.0,
        recovered=end < history.step.size,
        had_trained=bool((~history.skipped[:start]).any()),
        had_grown=bool((np.diff(good) > 0).any()),
    )
