"""A forecast says when a magnitude that grows, or falls, will reach a limit: by a line that no outlier can fool."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
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


#: A magnitude at a step: the step, and the base-2 logarithm of the magnitude.
Point = tuple[int, float]
#: Fewer points say nothing.
LEAST_POINTS = 6
#: Points that are looked at; more are put together first.
MOST_POINTS = 48
#: A forecast looks ahead at most this many times as far as the growth has been seen.
FARTHEST = 3.0
#: Growth has to have come so far, in bits and as a multiple of the noise, before it counts as any.
LEAST_RISE, RISE_OVER_NOISE = 1.0, 4.0
#: Mann-Kendall's statistic, in standard deviations, above which a trend is no chance: one in a thousand.
CERTAIN = 3.1
#: Of the growth as a whole, what it has to be in its latest third, and in its latest fifth: less has begun to end.
STILL_GROWS = ((3, 0.6), (5, 0.45))
#: Ways to grow, by the power of the magnitude that grows evenly: 1 by the same amount each step, 1/2 as its square, 1/4
#: as its fourth power, 0 by the same factor (its logarithm does).
_WAYS = (0.0, 0.25, 0.5, 1.0)
#: A way explains the points where each fifth of them lies this close to the line: within a share of the rise, but for
#: so many bits at most, or within the noise that many times over.
_PARTS, _BENT, _MOST_BENT, _BENT_BY_NOISE = 5, 0.06, 0.2, 1.5
#: What fits as well as the best way, but for this factor (and so many bits), might be the way as well.
_AS_GOOD, _AS_GOOD_BITS = 1.2, 0.005
#: The part of the points that say something of their own: neighbours say much the same.
_OWN_WORD = 1 / 3
#: The part of what is to come by which a forecast is uncertain whatever the points say.
_UNKNOWN = 0.1
#: Stands for heights of a line at which there is nothing left.
_NOTHING = 2.0**-40
#: How much shorter each stretch is that is tried as the present regime.
_SHORTER = 0.7


class Forecast(NamedTuple):
    """When a limit is reached."""

    step: int  #: most likely
    low: int  #: not before this one,
    high: int  #: nor after it, in about 19 of 20 such forecasts
    bits_per_step: float  #: growth at present, negative where it falls
    since: int  #: the step since which it has grown like that
    rise: float  #: bits that it has grown since


def forecast(points: Sequence[Point], limit: float, *, farthest: float = FARTHEST) -> Forecast | None:
    """When what grows will reach a limit.

    Args:
        points: Magnitudes by rising step.
        limit: The base-2 logarithm of the limit.
        farthest: How many times as far as the growth has been seen to look ahead at most.

    Returns:
        None where there is no real trend, where it has been seen for too short a time to be told so far ahead, where
        it is about to end, and where the limit has been reached already.
    """
    if not may_reach(points, limit, farthest=farthest):
        return None
    together = thinned(points)
    if highest_score([height for _, height in together], LEAST_POINTS) < CERTAIN:
        return None
    for stretch in _regimes(together):
        ways = list(_explained(stretch))
        if ways:
            return _told(stretch, ways, limit, farthest)
    return None


def forecast_overflow(points: Sequence[Point], limit: float) -> Forecast | None:
    """When what grows will overflow, as `forecast`: what came up from less than one has to have grown on from there.

    What comes up from nothing to the size of what networks compute with, as an adapter that begins at zero does, has
    been learnt. It says nothing of what comes after.
    """
    found = forecast(points, limit)
    if found is None:
        return None
    small = next((place for place in range(len(points), 0, -1) if points[place - 1][1] < 0.0), 0)
    goes_on = not small or forecast(points[small:], limit, farthest=math.inf) is not None
    return found if goes_on else None


def forecast_fall(points: Sequence[Point], limit: float) -> Forecast | None:
    """When what falls will reach a limit below it, as `forecast`."""
    found = forecast([(step, -height) for step, height in points], -limit)
    return found._replace(bits_per_step=-found.bits_per_step) if found is not None else None


def may_reach(points: Sequence[Point], limit: float, *, farthest: float = FARTHEST) -> bool:
    """Whether a limit is near enough for what has been seen; quickly, for most things do not grow at all."""
    if len(points) < LEAST_POINTS:
        return False
    last = max(height for _, height in points[-2:])
    rise = last - min(height for _, height in points)
    return rise >= LEAST_RISE and last < limit <= last + 2 * farthest * rise


def bits_per_step(points: Sequence[Point]) -> float | None:
    """How fast a magnitude grows or falls over all points, robustly; None for fewer than two."""
    if len(points) < 2:
        return None
    together = thinned(points, MOST_POINTS // 2)
    return robust_slope(*_apart(together))


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most so many points; of neighbours that are put together, the middle one of each coordinate."""
    if len(points) <= most:
        return list(points)
    bounds = [number * len(points) // most for number in range(most + 1)]
    groups = [points[a:b] for a, b in itertools.pairwise(bounds)]
    return [(group[len(group) // 2][0], median(height for _, height in group)) for group in groups]


def _apart(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [float(step) for step, _ in points], [height for _, height in points]


def _regimes(points: list[Point]) -> Iterator[list[Point]]:
    """Stretches that end now, the longest first: the longest that one way explains is the present regime."""
    count = len(points)
    while count >= LEAST_POINTS:
        yield points[-count:]
        count = int(count * _SHORTER)


class _Way(NamedTuple):
    """A way to grow, fitted."""

    power: float
    line: RobustLine  #: through the magnitudes, relative to the largest, to that power; through logarithms for 0
    top: float  #: the largest logarithm
    error: float  #: what is left in bits: half of the points are nearer; and how far it is bent
    bend: float  #: bits by which the line misses a fifth of the points at most
    steps: list[float]  #: of the points,
    heights: list[float]  #: and what the line is fitted to

    @property
    def goes_on(self) -> bool:
        """Whether the growth has not begun to end."""
        return all(_latest(self.steps, self.heights, part) >= share * self.line.slope for part, share in STILL_GROWS)

    def log_at(self, step: float) -> float:
        """The logarithm that the line tells for a step."""
        height = self.line.at(step)
        return self.top + (math.log2(max(height, _NOTHING)) / self.power if self.power else height)

    def rate_at(self, step: float) -> float:
        """How fast that grows there, in bits a step."""
        if not self.power:
            return self.line.slope
        return self.line.slope / (self.power * math.log(2) * max(self.line.at(step), _NOTHING))

    def reaches(self, limit: float) -> tuple[float, float, float]:
        """When the line reaches a limit: most likely, at the earliest, at the latest."""
        height = 2.0 ** (self.power * (limit - self.top)) if self.power else limit - self.top
        slopes = (self.line.slope, self.line.slope_high, self.line.slope_low)
        first, low, high = (self.line.reaches(height, slope) for slope in slopes)
        return first, low, high


def _explained(points: list[Point]) -> Iterator[_Way]:
    """The ways that explain the points, as well as the best does, best first; none where none does."""
    steps, logs = _apart(points)
    most_bent = max(min(_BENT * (max(logs) - min(logs)), _MOST_BENT), _BENT_BY_NOISE * noise(logs))
    ways = sorted((_fitted(power, steps, logs) for power in _WAYS), key=lambda way: way.error)
    for way in ways:
        if way.bend <= most_bent and way.error <= _AS_GOOD * ways[0].error + _AS_GOOD_BITS:
            yield way


def _fitted(power: float, steps: list[float], logs: list[float]) -> _Way:
    top = max(logs)
    heights = [2.0 ** (power * (log - top)) if power else log - top for log in logs]
    line = robust_line(steps, heights)
    way = _Way(power, line, top, 0.0, 0.0, steps, heights)
    left = [log - way.log_at(step) for step, log in zip(steps, logs, strict=True)]
    bend = _bend(left)
    return way._replace(error=median(map(abs, left)) + bend / 2, bend=bend)


def _latest(steps: list[float], heights: list[float], part: int) -> float:
    """The slope of the latest part of the points."""
    begin = len(steps) - max(3, len(steps) // part)
    return robust_slope(steps[begin:], heights[begin:])


def _bend(left: list[float]) -> float:
    """How far a fifth of the points, one after the other, lies off the line at most; by its middle one."""
    bounds = [number * len(left) // _PARTS for number in range(_PARTS + 1)]
    return max(abs(median(left[a:b])) for a, b in itertools.pairwise(bounds))


def _told(points: list[Point], ways: list[_Way], limit: float, farthest: float) -> Forecast | None:
    """The forecast of the ways that might be the one; None where it is none."""
    best, first, last = ways[0], points[0][0], points[-1][0]
    logs = [height for _, height in points]
    now = best.log_at(last)
    rise = now - median(logs[: max(2, len(logs) // 8)])
    is_real = best.line.score >= CERTAIN and rise >= max(LEAST_RISE, RISE_OVER_NOISE * noise(logs))
    if not is_real or not best.goes_on or now >= limit:
        return None
    reached = [way.reaches(limit) for way in ways]
    low, high = min(each[1] for each in reached), max(each[2] for each in reached)
    if not math.isfinite(high):
        return None
    step = last + _most_likely(ways, [each[0] - last for each in reached], len(points))
    if step - last > farthest * (last - first):
        return None
    unknown = _UNKNOWN * (step - last)
    return Forecast(
        step=max(last + 1, round(step)),
        low=max(last + 1, math.floor(min(low, step - unknown))),
        high=max(last + 1, math.ceil(max(high, step + unknown))),
        bits_per_step=best.rate_at(last),
        since=first,
        rise=rise,
    )


def _most_likely(ways: list[_Way], left: list[float], count: int) -> float:
    """The steps that are left: those of each way, by how likely it is."""
    weights = [(way.error + _AS_GOOD_BITS) ** -max(2.0, count * _OWN_WORD) for way in ways]
    logs = (weight * math.log(max(each, 1.0)) for weight, each in zip(weights, left, strict=True))
    return math.exp(sum(logs) / sum(weights))
