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
#: A growth that was too much shows within so many steps, a tenth of the usual interval; later, gradients have changed.
PROBE_STEPS = 200
#: Rows of skips, and the share of steps lost in them, from which on a scale that never held is not finding its place.
RESTLESS_ROWS, RESTLESS_SHARE = 5, 0.4
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
    had_grown: bool  #: the scale had been raised since the skip before, and not long ago
    settles: bool  #: the scale came to hold after it, or may still: without skips below 1, and without end

    @property
    def count(self) -> int:
        """How many steps were skipped."""
        return self.last - self.first + 1

    @property
    def is_single(self) -> bool:
        """Whether one step was skipped, and a good one followed."""
        return self.count == 1 and self.recovered

    @property
    def calibrates(self) -> bool:
        """Whether this looks like the scale finding its place rather than collapsing."""
        ends = self.recovered or self.count <= LONGEST_CALIBRATION
        return ends and self.settles and self.lowest_scale >= LOWEST_USEFUL_SCALE

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
    good = history.scale[max(since_last_skip, start - PROBE_STEPS) : start + 1]
    return SkipRun(
        position=start,
        first=int(history.step[start]),
        last=int(history.step[end - 1]),
        lowest_scale=float(known.min()) if known.size else 1.0,
        recovered=end < history.step.size,
        had_trained=bool((~history.skipped[:start]).any()),
        had_grown=bool((good[1:] > good[:-1]).any()),
        settles=_settles(history, start, end),
    )


def _settles(history: History, start: int, end: int) -> bool:
    """Whether the scale came to hold after a row of skips; what a run's end has cut short may still.

    Calibration is harmless because it ends. One that goes on to scales below 1, or in which a good part of the steps is
    lost again and again, does not.
    """
    at = np.flatnonzero(history.skipped)
    gaps = np.diff(np.concatenate(([-1], at, [history.step.size]))) - 1  # good steps before, between and after skips
    long = np.flatnonzero(gaps >= CALIBRATION_STEPS)
    here = int(np.searchsorted(at, start))  # which skip: the gap with this number is before it
    after = long[long > here + end - 1 - start]
    since = int(at[before[-1]]) if (before := long[long <= here]).size else 0
    held = int(at[after[0] - 1]) + 1 if after.size else history.step.size
    lost = history.skipped[since:held]
    if (history.scale[since:held][lost] < LOWEST_USEFUL_SCALE).any():
        return False
    rows = int((np.diff(lost.astype(np.int8), prepend=0) > 0).sum())
    return bool(after.size or rows < RESTLESS_ROWS or lost.mean() < RESTLESS_SHARE)
