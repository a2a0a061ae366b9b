"""From sample to sample it is followed how far each place of the program is from the limits of its dtype."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ampscope.capture.tracing.sites import SiteKey, Sites, dtype_name
from ampscope.forecast import Forecast, forecast_overflow, may_reach
from ampscope.provenance import large_values
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import ENTRY_NODES, Node, Phase

#: Doublings left at which a value that moves makes the next sample come sooner.
NEAR_BITS = 2.0
#: Doublings from a dtype's largest, or from its smallest normal number, at which every statistic is taken each time.
_CLOSE_BITS = 4.0
#: Phases whose values are as the model makes them; gradients carry the loss scale, which is there to fill their range.
_UNSCALED = frozenset({Phase.FORWARD, Phase.LOSS})
#: Samples that are kept; where they are more, every second one of the older goes.
_MOST_SAMPLES = 48
#: Places that are followed, and of those that may be on their way to overflow those that are asked about.
_MOST_PLACES, _MOST_ASKED = 4096, 16
#: A value is told to be near overflow where it may not double, in so many samples that were the newest.
TOLD_BITS, NEWEST = 1.0, 3
#: Bits that a value counts as having moved at least.
_LEAST_MOVED = 0.01


class Outlook(NamedTuple):
    """The outlook that a sampled step gives on the steps to come."""

    steps_left: float = math.inf  #: at the pace since the sample before, until the first value overflows
    headroom: float = math.inf  #: doublings left of the value nearest to overflow, of those that have moved
    closest: tuple[int, ...] = ()  #: sites near a limit, the nearest first


class NearOverflow(NamedTuple):
    """A place whose values are near overflow, or on their way there."""

    place: int  #: its number
    bits: float  #: doublings left
    forecast: Forecast | None  #: None where it is near and does not grow


class SampledRanges:
    """The largest magnitudes of the samples so far, by place: an op of a module at a line, whatever its shapes.

    A value that is the same to the last bit in two samples is a constant (a mask, a bound): it does not grow.

    Args:
        sites: The numbered program points.
    """

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._numbers: dict[tuple[Any, ...], int] = {}  # of places
        self._places: list[int] = []  # of each site
        # By place: base-2 logarithm of the largest number that its results can hold, exponent of the smallest normal
        # one, and whether what it gives is as the model makes it, and may grow. One list: a signal may come between.
        self._limits: list[tuple[float, int, bool]] = []
        self._before: NDArray[np.float64] = np.empty(0)
        self._steps: NDArray[np.float64] = np.empty(0)  # at which that was
        self._overflown: set[int] = set()  # places that were infinite
        self._samples: list[tuple[int, NDArray[np.float32]]] = []  # by place, the logarithms of the largest magnitudes

    def note(self, step: int, site: NDArray[Any], low: NDArray[np.float64], high: NDArray[np.float64]) -> Outlook:
        """Compares a sampled step with the one before.

        Args:
            step: Its number.
            site: Of each output that was measured.
            low: Their least elements; NaN where there is none.
            high: Their greatest.
        """
        self._describe()
        count, place = len(self._limits), np.array(self._places, np.intp)[site.astype(np.intp) - self._sites.first]
        tops, normals, moves = np.array(self._limits, float).reshape(-1, 3).T
        largest = np.full(count, np.nan)
        np.fmax.at(largest, place, np.fmax(np.abs(low), np.abs(high)))
        before, since = (_longer(each, count) for each in (self._before, self._steps))
        known = ~np.isnan(largest)
        self._overflown |= set(np.flatnonzero(np.isinf(largest)).tolist())
        self._before, self._steps = np.where(known, largest, before), np.where(known, step, since)
        with np.errstate(divide="ignore", invalid="ignore"):
            bits, earlier = np.log2(largest), np.log2(before)
            headroom = tops - bits
            moved = (largest != before) & np.isfinite(earlier) & np.isfinite(bits) & (moves != 0)
            pace = np.where(moved & (bits > earlier), (bits - earlier) / np.fmax(step - since, 1.0), 0.0)
            left = np.where(pace > 0, headroom / pace, np.inf)
            left[moved & (headroom < NEAR_BITS)] = 0.0
            room = np.fmin(headroom, bits - normals)
        self._keep(step, bits)
        close = np.isfinite(room[place]) & (room[place] < _CLOSE_BITS)
        nearest = {int(number): float(bit) for number, bit in zip(site[close], room[place][close], strict=True)}
        order = tuple(sorted(nearest, key=lambda each: nearest[each]))
        nearest_left, room_left = (min(each.tolist(), default=math.inf) for each in (left, headroom[moved]))
        return Outlook(nearest_left, room_left, order)

    def ahead(self) -> list[NearOverflow]:
        """The places that are near overflow or on their way there, those that get there first before the others."""
        if not self._samples:
            return []
        count = min(len(self._samples[-1][1]), _MOST_PLACES)
        heights = np.array([_longer(bits, count) for _, bits in self._samples])
        tops, _, moves = np.array(self._limits[:count], float).reshape(-1, 3).T
        with np.errstate(invalid="ignore"):
            heights[~np.isfinite(heights)] = np.nan
            seen = np.count_nonzero(~np.isnan(heights), 0)
            last, least = np.fmax.reduce(heights[-NEWEST:], 0), np.fmin.reduce(heights, 0)
            varies = np.fmax.reduce(heights, 0) > least
            room = tops - last
            asked = np.flatnonzero((moves != 0) & varies & (seen >= NEWEST) & ~np.isnan(heights[-1]) & (room > 0))
            asked = asked[~np.isin(asked, list(self._overflown))]  # those were judged by what came of it
        near = np.argsort(room[asked] / np.fmax(last - least, _LEAST_MOVED)[asked], kind="stable")[:_MOST_ASKED]
        found = [self._ahead(int(place), heights[:, place], float(room[place])) for place in asked[near]]
        return sorted([each for each in found if each is not None], key=_expected)

    def _ahead(self, place: int, heights: NDArray[np.float64], room: float) -> NearOverflow | None:
        steps = [step for step, _ in self._samples]
        points = [(step, bit) for step, bit in zip(steps, heights.tolist(), strict=True) if not math.isnan(bit)]
        top, _, _ = self._limits[place]
        expected = forecast_overflow(points, top) if may_reach(points, top) else None
        return NearOverflow(place, room, expected) if expected is not None or room < TOLD_BITS else None

    def is_of(self, site: int, place: int) -> bool:
        """Whether a site is one of a place's."""
        return self._places[site - self._sites.first] == place

    def _keep(self, step: int, bits: NDArray[np.float64]) -> None:
        if len(self._samples) == _MOST_SAMPLES:
            half = _MOST_SAMPLES // 2
            self._samples = self._samples[:half:2] + self._samples[half:]
        self._samples.append((step, bits[:_MOST_PLACES].astype(np.float32)))

    def _describe(self) -> None:
        """Takes in the sites that are new."""
        for number in range(self._sites.first + len(self._places), self._sites.first + len(self._sites)):
            point = self._sites.point(number)
            formats = [FINFO[name] for name in map(dtype_name, point.outputs.dtypes) if name in FINFO]
            narrow = min(formats, key=lambda each: each.max, default=None)
            key = (point.op, point.module, point.phase, point.place.file, point.place.line, point.name, narrow)
            place = self._numbers.get(key)
            if place is None:
                place, may_grow = len(self._limits), narrow is not None and _may_grow(point)
                top, normal = (math.log2(narrow.max), narrow.normal) if narrow else (math.inf, -(1 << 14))
                self._limits.append((top, normal, may_grow))
                self._numbers[key] = place
            self._places.append(place)


def _may_grow(point: SiteKey) -> bool:
    given = point.op in ENTRY_NODES and point.op != Node.PARAMETER
    return point.phase in _UNSCALED and not given and not large_values.is_bounded(point.op, lambda: dict(point.scalars))


def _expected(ahead: NearOverflow) -> tuple[bool, float]:
    return ahead.forecast is None, ahead.forecast.step if ahead.forecast is not None else ahead.bits


def _longer(values: NDArray[Any], count: int) -> NDArray[np.float64]:
    found = np.full(count, np.nan)
    found[: len(values)] = values[:count]
    return found
