"""A line through noisy points that neither outliers nor noise with a memory can fool."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

#: Quantile of the normal distribution for the ends of an interval: 95 %.
_NORMAL_95 = 1.96
#: Noise is never taken for more persistent than this, from one point to the next.
_MOST_PERSISTENT = 0.9


class RobustLine(NamedTuple):
    """The Theil-Sen line of a series with Sen's interval for its slope (Sen, 1968), and the Mann-Kendall test."""

    slope: float
    slope_low: float  #: ends of its interval
    slope_high: float
    middle: float  #: where the line is turned about: the median place,
    height: float  #: and its height there
    score: float  #: Mann-Kendall's statistic in standard deviations, positive where the series rises

    def at(self, place: float) -> float:
        """Height of the line."""
        return self.height + self.slope * (place - self.middle)

    def reaches(self, height: float, slope: float | None = None) -> float:
        """Returns where the line, or one of another slope through its middle, reaches a height; infinity for never."""
        slope = self.slope if slope is None else slope
        return self.middle + (height - self.height) / slope if slope > 0 else math.inf


def robust_line(places: Sequence[float], heights: Sequence[float]) -> RobustLine:
    """The line through at least two points at rising places.

    Where what is left after the line is like its neighbours, the points say less than their number: the variance of
    the test is widened as for a first-order autoregression (Hamed and Rao, 1998, in its simplest form).
    """
    count = len(places)
    slopes = _slopes(places, heights)
    slope, middle = median(slopes), median(places)
    height = median(y - slope * (x - middle) for x, y in zip(places, heights, strict=True))
    left = [y - height - slope * (x - middle) for x, y in zip(places, heights, strict=True)]
    memory = min(max(autocorrelation(left), 0.0), _MOST_PERSISTENT)
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18 * (1 + memory) / (1 - memory))
    rises = len(slopes) - bisect_right(slopes, 0.0) - bisect_left(slopes, 0.0)
    low, high = ((len(slopes) + side * _NORMAL_95 * deviation) / 2 for side in (-1, 1))
    return RobustLine(
        slope=slope,
        slope_low=slopes[max(0, math.floor(low))],
        slope_high=slopes[min(len(slopes) - 1, math.ceil(high))],
        middle=middle,
        height=height,
        score=(rises - math.copysign(1, rises)) / deviation if rises else 0.0,
    )


def robust_slope(places: Sequence[float], heights: Sequence[float]) -> float:
    """The slope of `robust_line` alone, which takes half of the time."""
    return median(_slopes(places, heights))


def _slopes(places: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Returns the slopes of all pairs of points, ascending."""
    points = list(zip(places, heights, strict=True))
    return sorted((high - low) / (late - early) for (early, low), (late, high) in itertools.combinations(points, 2))


def highest_score(heights: Sequence[float], least: int) -> float:
    """The most that Mann-Kendall's statistic comes to in any stretch of so many points or more that ends with the last.

    As in `robust_line`, but for noise without a memory, which would make it less. It is the same for each power and the
    logarithm of the heights, so that it tells quickly where there is no trend, whatever the way to grow.
    """
    rises, highest = 0, 0.0
    after: list[float] = []  # in order of size
    for begin in range(len(heights) - 1, -1, -1):
        place = bisect_left(after, heights[begin])
        rises += len(after) - bisect_right(after, heights[begin]) - place
        after.insert(place, heights[begin])
        count = len(heights) - begin
        if count >= least and rises > 1:
            highest = max(highest, (rises - 1) / math.sqrt(count * (count - 1) * (2 * count + 5) / 18))
    return highest


def autocorrelation(values: Sequence[float]) -> float:
    """Returns the correlation of a series with itself shifted by one, between -1 and 1; 0 where it does not move."""
    mean = sum(values) / len(values)
    apart = [each - mean for each in values]
    whole = sum(each * each for each in apart)
    return sum(a * b for a, b in itertools.pairwise(apart)) / whole if whole else 0.0


def noise(heights: Sequence[float]) -> float:
    """How far neighbours lie apart by chance, as a standard deviation; a trend between them does not count.

    By second differences, of which a straight line has none.
    """
    bends = [abs(a - 2 * b + c) for a, b, c in zip(heights, heights[1:], heights[2:], strict=False)]
    return 1.4826 * median(bends) / math.sqrt(6) if bends else 0.0
