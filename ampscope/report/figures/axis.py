"""Axes: their bounds, and the labels along them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.analysis.arrays import Curve
from ampscope.analysis.words import power_of_two
from ampscope.report.numbers import count, value

#: A curve of positive values that spans more than this factor is drawn on a logarithmic axis.
WIDE = 1000.0
#: Labels along the steps, up an axis of round numbers, and up one of powers.
_STEP_TICKS, _ROUND_TICKS, _POWER_TICKS = 6, 4, 5
#: Powers of two between two labels of a scale's axis.
_STRIDES = (1, 2, 4, 8, 16, 32, 64)
#: The least that an axis spans, as a share of the values or in powers of ten.
_LEAST_SHARE, _LEAST_DECADES = 0.002, 0.02
#: Room below the values, above them, and above them where marks stand at the top edge, in shares of their extent.
_AIR_BELOW, _AIR_ABOVE, _AIR_FOR_MARKS = 0.1, 0.08, 0.3
#: Leading digits on a logarithmic axis, ever finer.
_DIGITS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9))
#: Powers of ten beyond which a float holds them no more, with room for a digit.
_LARGEST_POWER = 307
#: The least between two labels that a float holds with all its digits.
_LEAST_STRIDE = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The range that an axis spans, and the labels along it."""

    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    is_round: bool = False  #: its ticks are round numbers: who zooms may be given others
    whole: bool = False  #: there is nothing between two whole numbers

    def place(self, number: float) -> float:
        """Returns the place of a value on the axis, from 0 at the low end to 1 at the high end."""
        low, high, at = self.low, self.high, number
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return (at - low) / (high - low) if high > low else 0.5

    def percent(self, number: float) -> float:
        """Returns the place of a value in percent of the axis, at an end of it for one beyond."""
        return min(max(100 * self.place(number), 0.0), 100.0)

    @property
    def labelled(self) -> list[tuple[float, str]]:
        """Returns the labels, each with its place in percent of the axis."""
        return [(self.percent(tick), label) for tick, label in zip(self.ticks, self.labels, strict=True)]


def step_axis(steps: Sequence[int]) -> Axis:
    """Optimizer steps from the first to the last of ``steps``."""
    low, high = min(steps, default=0), max(steps, default=0)
    ticks = round_ticks(low, high, _STEP_TICKS, whole=True)
    return Axis(low=low, high=high, ticks=ticks, labels=tuple(map(count, ticks)), is_round=True, whole=True)


def linear_axis(low: float, high: float) -> Axis:
    """Round numbers between two bounds."""
    ticks = [tick for tick in round_ticks(low, high, _ROUND_TICKS) if low <= tick <= high]
    return Axis(low=low, high=high, ticks=tuple(ticks), labels=tuple(map(value, ticks)), is_round=True)


def measure_axis(values: Sequence[float], *, log: bool, crowded: bool) -> Axis:
    """An axis for measured values with a little air, and room at the top for marks where it is ``crowded``."""
    if not values:
        return Axis(low=0.0, high=1.0, ticks=(0.5,), labels=("",))
    low, high = (math.log10(min(values)), math.log10(max(values))) if log else (min(values), max(values))
    least = _LEAST_DECADES if log else _LEAST_SHARE * max(abs(low), abs(high))
    if high - low < least:  # rounding errors are nothing to look at
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
    extent = high - low or 1.0
    low, high = low - _AIR_BELOW * extent, high + (_AIR_FOR_MARKS if crowded else _AIR_ABOVE) * extent
    return _log_axis(low, high) if log else linear_axis(low, high)


def scale_axis(curve: Curve) -> Axis:
    """Powers of two around a loss scale that is given by its base-2 logarithm."""
    low, high = (min(curve.values), max(curve.values)) if curve.values else (0.0, 1.0)
    low, high = math.floor(low) - 1, math.ceil(high) + 1
    stride = next((stride for stride in _STRIDES if (high - low) / stride <= _POWER_TICKS), _STRIDES[-1])
    powers = [power for power in range(low, high + 1) if power % stride == 0]
    labels = tuple(map(power_of_two, powers))
    return Axis(low=low - 0.3, high=high + 0.3, ticks=tuple(map(float, powers)), labels=labels)


def round_ticks(low: float, high: float, most: int, *, whole: bool = False) -> tuple[float, ...]:
    """At most about ``most`` round numbers between two bounds."""
    raw = (high - low) / most
    if not _LEAST_STRIDE < raw < math.inf:
        return (low,)
    power = 10.0 ** math.floor(math.log10(raw))
    stride = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= raw)
    stride = max(stride, 1.0) if whole else stride
    start = math.ceil(low / stride - 1e-9)
    ticks = (number * stride for number in range(start, start + 2 * most + 2))
    return tuple(tick for tick in ticks if tick <= high + 1e-9 * stride)


def _log_axis(low: float, high: float) -> Axis:
    low, high = max(low, -_LARGEST_POWER), min(high, _LARGEST_POWER)
    ticks = _log_ticks(low, high)
    return Axis(low=10**low, high=10**high, log=True, ticks=ticks, labels=tuple(map(value, ticks)))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten between two exponents; where there are few of them finer numbers, at last equal steps."""
    stride = max(1, math.ceil((high - low) / _POWER_TICKS))
    powers = [power for power in range(math.floor(low), math.ceil(high) + 1) if power % stride == 0]
    powers = [power for power in powers if abs(power) <= _LARGEST_POWER]
    for digits in _DIGITS:
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        inside = [tick for tick in ticks if low <= math.log10(tick) <= high]
        if len(inside) > 1:
            return tuple(inside)
    return round_ticks(10**low, 10**high, _ROUND_TICKS)
