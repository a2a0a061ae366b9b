"""Panels over steps before they are drawn: which values, on which axis, and what cannot stand on it.

The app draws them with Plotly, the report as SVG; both say the same.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ampscope.analysis.numerics.curve import Curve
from ampscope.analysis.words.scale_words import in_words
from ampscope.report.html.phrases import value

#: A curve of positive values that spans more than this factor is drawn on a logarithmic axis.
WIDE = 1000.0
#: Powers of two between two labels of a scale's axis, the smallest that leaves at most `_LABELS`.
_STRIDES = (1, 2, 4, 8, 16, 32, 64)
_LABELS = 5
#: The least that an axis spans, as a share of the values or in powers of ten.
_LEAST_SHARE, _LEAST_DECADES = 0.002, 0.02
#: Leading digits on a logarithmic axis, ever finer.
_DIGITS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9))
#: Powers of ten beyond which a float holds them no more, with room for a digit.
_LARGEST_POWER = 307
_RAISED = str.maketrans(
    "0123456789-",
    "\N{SUPERSCRIPT ZERO}\N{SUPERSCRIPT ONE}\N{SUPERSCRIPT TWO}\N{SUPERSCRIPT THREE}\N{SUPERSCRIPT FOUR}"
    "\N{SUPERSCRIPT FIVE}\N{SUPERSCRIPT SIX}\N{SUPERSCRIPT SEVEN}\N{SUPERSCRIPT EIGHT}\N{SUPERSCRIPT NINE}"
    "\N{SUPERSCRIPT MINUS}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The y axis of a panel; without ``ticks`` whoever draws it chooses them."""

    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()

    def place(self, number: float) -> float:
        """Where a value stands, from 0 at the bottom to 1 at the top."""
        low, high, at = (self.low, self.high, number)
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return (at - low) / (high - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Steps whose value has no place on a panel's axis."""

    steps: tuple[int, ...] = ()
    key: str = ""  #: what the mark means, beside the panel's name
    told: str = ""  #: what it says of one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A value by step."""

    name: str
    curve: Curve
    axis: Axis
    tell: Callable[[float], str]  #: a value in words
    stepped: bool = False
    above: Edge = Edge()
    below: Edge = Edge()
    target: float | None = None
    target_words: str = ""

    @property
    def pieces(self) -> list[list[tuple[int, float]]]:
        """Step and value of the curve, in pieces: it is broken where a step's value stands at an edge."""
        breaks = sorted({*self.above.steps, *self.below.steps})
        points = zip(self.curve.steps, self.curve.values, strict=True)
        return [list(piece) for _, piece in groupby(points, lambda point: bisect(breaks, point[0]))]


def measure_panel(curve: Curve, name: str, alarm: str, *, log: bool = False) -> Panel:
    """A measured value; what is not finite stands at the top edge, a zero on a logarithmic axis at the bottom."""
    positive = [number for number in curve.values if number > 0]
    wide = len(positive) == len(curve.values) and bool(positive) and max(positive) > WIDE * min(positive)
    log = bool(positive) and (log or wide)
    drawn = _positive(curve) if log else curve
    zeros = [step for step, number in zip(curve.steps, curve.values, strict=True) if number <= 0] if log else []
    return Panel(
        name=name,
        curve=drawn,
        axis=_axis(drawn.values, log=log, crowded=bool(curve.nonfinite)),
        tell=lambda number: f"{name} {value(number)}",
        above=Edge(steps=curve.nonfinite, key="NaN or infinite", told=alarm),
        below=Edge(steps=tuple(zeros), key="zero", told=f"{name} was 0"),
    )


def scale_panel(curve: Curve) -> Panel:
    """A loss scale, given by its base-2 logarithm, on an axis of powers of two; a scale of 0 stands at the bottom."""
    low, high = (min(curve.values), max(curve.values)) if curve.values else (0.0, 1.0)
    low, high = math.floor(low) - 1, math.ceil(high) + 1
    stride = next((stride for stride in _STRIDES if (high - low) / stride <= _LABELS), _STRIDES[-1])
    ticks = tuple(float(tick) for tick in range(low, high + 1) if tick % stride == 0)
    labels = tuple(power_of_two(int(tick)) for tick in ticks)
    return Panel(
        name="loss scale",
        curve=curve,
        axis=Axis(low=low - 0.3, high=high + 0.3, ticks=ticks, labels=labels),
        tell=lambda power: f"loss scale {in_words(2.0**power)}",
        stepped=True,
        below=Edge(steps=curve.nonfinite, key="zero", told="the loss scale was 0"),
    )


def counter_panel(curve: Curve, name: str, *, target: float | None = None) -> Panel:
    """A counter from 0 that climbs towards ``target``, which is drawn as a line where it is near."""
    high = max(curve.values, default=1.0)
    near = target is not None and target <= 4 * max(high, 1.0)
    top = max(high, target or 0.0) if near else high
    return Panel(
        name=name,
        curve=curve,
        axis=Axis(low=0.0, high=1.15 * max(top, 1.0)),
        tell=lambda number: f"{name} {number:,.0f}",
        stepped=True,
        target=target if near else None,
        target_words=f"grows at {target:,.0f}" if near else "",
    )


def power_of_two(exponent: int) -> str:
    """``2`` with a raised exponent."""
    return f"2{str(exponent).translate(_RAISED)}"


def _positive(curve: Curve) -> Curve:
    kept = [(step, number) for step, number in zip(curve.steps, curve.values, strict=True) if number > 0]
    return Curve(steps=tuple(step for step, _ in kept), values=tuple(number for _, number in kept))


def _axis(values: Sequence[float], *, log: bool, crowded: bool) -> Axis:
    """Bounds with a little air, and room at the top for marks where there are any."""
    if not values:
        return Axis(low=0.0, high=1.0, ticks=(0.5,), labels=("",))
    headroom = 0.3 if crowded else 0.08
    low, high = (math.log10(min(values)), math.log10(max(values))) if log else (min(values), max(values))
    least = _LEAST_DECADES if log else _LEAST_SHARE * max(abs(low), abs(high))
    if high - low < least:  # rounding errors are no story
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
    extent = high - low or 1.0
    low, high = low - 0.1 * extent, high + headroom * extent
    if not log:
        return Axis(low=low, high=high)
    low, high = max(low, -_LARGEST_POWER), min(high, _LARGEST_POWER)
    ticks = _log_ticks(low, high)
    return Axis(low=10**low, high=10**high, log=True, ticks=ticks, labels=tuple(map(value, ticks)))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten between two exponents; where there are few of them finer numbers, at last the ends themselves."""
    stride = max(1, math.ceil((high - low) / _LABELS))
    powers = [power for power in range(math.floor(low), math.ceil(high) + 1) if power % stride == 0]
    powers = [power for power in powers if abs(power) <= _LARGEST_POWER]
    for digits in _DIGITS:
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        inside = [tick for tick in ticks if low <= math.log10(tick) <= high]
        if len(inside) > 1:
            return tuple(inside)
    return (10**low, 10 ** ((low + high) / 2), 10**high)
