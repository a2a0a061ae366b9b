"""The course of a loss scale: what can be counted of the attempts of one optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from ampscope.analysis.numerics.arrays import BoolArray, FloatArray, IntArray
from ampscope.analysis.scale.scaler_log import ScalerSettings
from ampscope.analysis.scale.skip_runs import CALIBRATION_STEPS


class Attempts(Protocol):
    """The step attempts of one optimizer, in order; a scale that was not recorded is NaN."""

    @property
    def optimizer(self) -> int:
        """Its number."""

    @property
    def step(self) -> IntArray:
        """Numbers of the attempts."""

    @property
    def scale(self) -> FloatArray:
        """The loss scale of each."""

    @property
    def skipped(self) -> BoolArray:
        """Whether each was skipped."""

    @property
    def bad_loss(self) -> BoolArray:
        """Whether the loss itself of each was recorded as not finite, before any scale."""


@dataclass(frozen=True)
class Course:
    """The attempts that had a scale, and what can be counted of them."""

    step: IntArray
    scale: FloatArray
    skipped: BoolArray
    bad_loss: BoolArray
    settings: ScalerSettings

    @cached_property
    def rows(self) -> tuple[IntArray, IntArray]:
        """First and one-past-last positions of the rows of skips."""
        padded = np.concatenate(([False], self.skipped, [False]))
        return np.flatnonzero(~padded[:-1] & padded[1:]), np.flatnonzero(padded[:-1] & ~padded[1:])

    @cached_property
    def settled(self) -> int:
        """Position at which calibration was over: the first growth or long stretch of good steps; the end without."""
        starts, ends = self.rows
        gaps = np.append(starts, self.skipped.size) - np.concatenate(([0], ends))
        long = np.flatnonzero(gaps >= CALIBRATION_STEPS)
        stretch = int(np.concatenate(([0], ends))[long[0]]) if long.size else self.skipped.size
        growths = np.flatnonzero(self.change > 0)
        return min(stretch, int(growths[0])) if growths.size else stretch

    @cached_property
    def change(self) -> FloatArray:
        """The scale's change after each attempt but the last; NaN where an infinite one stays."""
        with np.errstate(invalid="ignore"):
            return np.diff(self.scale)

    @cached_property
    def held(self) -> float | None:
        """The largest scale at which a stretch of steps worked."""
        values, counts = np.unique(self.scale[~self.skipped], return_counts=True)
        enough = values[counts >= min(CALIBRATION_STEPS, max(1, int((~self.skipped).sum()) // 2))]
        return float(enough[-1]) if enough.size else None

    @property
    def lost(self) -> int:
        """Skips after calibration."""
        return int(self.skipped[self.settled :].sum())

    def since(self, position: int) -> BoolArray:
        """Marks the attempts from ``position`` on."""
        marked: BoolArray = np.arange(self.skipped.size) >= position
        return marked

    @property
    def hopeless(self) -> BoolArray:
        """Whether each attempt was skipped because its loss was not finite: no scale would have saved it."""
        return self.skipped & self.bad_loss
