"""Follows from sample to sample how far each program point is from the limits of its dtype."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ampscope.capture.tracing.sites import Sites, dtype_name
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Phase

#: Doublings left at which a value that moves is near overflow.
NEAR_BITS = 2.0
#: Doublings from a dtype's largest, or from its smallest normal number, at which every statistic is taken each time.
_CLOSE_BITS = 4.0
#: Phases whose values are as the model makes them; gradients carry the loss scale, which is there to fill their range.
_UNSCALED = frozenset({Phase.FORWARD, Phase.LOSS})


class Outlook(NamedTuple):
    """What a sampled step says of those to come."""

    steps_left: float = math.inf  #: at the pace since the sample before, until the first value overflows
    closest: tuple[int, ...] = ()  #: sites near a limit, the nearest first


class Ranges:
    """The largest magnitudes of the sample before, by program point.

    A value that is the same to the last bit in two samples is a constant (a mask, a bound): it does not grow.

    Args:
        sites: The numbered program points.
    """

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._tops: list[float] = []  # by site, base-2 logarithm of the largest number that its results can hold
        self._normals: list[int] = []  # and the exponent of the smallest normal one
        self._moves: list[bool] = []  # whether what it gives is as the model makes it
        self._before: NDArray[np.float64] = np.empty(0)
        self._steps: NDArray[np.float64] = np.empty(0)  # at which that was

    def note(self, step: int, site: NDArray[Any], low: NDArray[np.float64], high: NDArray[np.float64]) -> Outlook:
        """Compares a sampled step with the one before.

        Args:
            step: Its number.
            site: Of each output that was measured.
            low: Their least elements; NaN where there is none.
            high: Their greatest.
        """
        self._describe()
        first, count = self._sites.first, len(self._tops)
        largest = np.full(count, np.nan)
        np.fmax.at(largest, site.astype(np.intp) - first, np.fmax(np.abs(low), np.abs(high)))
        before, since = (_longer(each, count) for each in (self._before, self._steps))
        known = ~np.isnan(largest)
        self._before, self._steps = np.where(known, largest, before), np.where(known, step, since)
        with np.errstate(divide="ignore", invalid="ignore"):
            bits, earlier = np.log2(largest), np.log2(before)
            headroom = np.array(self._tops) - bits
            moved = (largest != before) & np.isfinite(earlier) & np.isfinite(bits) & np.array(self._moves, bool)
            pace = np.where(moved & (bits > earlier), (bits - earlier) / np.fmax(step - since, 1.0), 0.0)
            left = np.where(pace > 0, headroom / pace, np.inf)
            left[moved & (headroom < NEAR_BITS)] = 0.0
            room = np.fmin(headroom, bits - np.array(self._normals))
        close = np.flatnonzero(np.isfinite(room) & (room < _CLOSE_BITS))
        closest = close[np.argsort(room[close], kind="stable")] + first
        return Outlook(min(left.tolist(), default=math.inf), tuple(closest.tolist()))

    def _describe(self) -> None:
        """Takes in the sites that are new."""
        for number in range(self._sites.first + len(self._tops), self._sites.first + len(self._sites)):
            point = self._sites.point(number)
            formats = [FINFO[name] for name in map(dtype_name, point.outputs.dtypes) if name in FINFO]
            narrow = min(formats, key=lambda each: each.max, default=None)
            self._tops.append(math.log2(narrow.max) if narrow else math.inf)
            self._normals.append(narrow.normal if narrow else -(1 << 14))
            self._moves.append(narrow is not None and point.phase in _UNSCALED)


def _longer(values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    found = np.full(count, np.nan)
    found[: len(values)] = values
    return found
