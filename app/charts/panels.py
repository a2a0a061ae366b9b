"""Single panels over steps: a measured value, a loss scale, a counter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go
from palette import ALARM, MARK
from phrases import value

from ampscope.analysis.curve import Curve
from ampscope.analysis.scale_story import in_words
from charts.canvas import BOTTOM, Axis, draw_curve, draw_edge

#: A curve of positive values that spans more than this factor is drawn on a logarithmic axis.
WIDE = 1000.0
#: Powers of two between two labels of a scale's axis, the smallest that leaves at most `_LABELS`.
_STRIDES = (1, 2, 4, 8, 16, 32, 64)
_LABELS = 5
#: Leading digits on a logarithmic axis, ever finer.
_DIGITS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9))


def draw_measure(figure: go.Figure, row: int, curve: Curve, name: str, alarm: str, *, log: bool = False) -> None:
    """A value by step; what is not finite is marked at the top edge, a zero on a logarithmic axis at the bottom."""
    positive = [number for number in curve.values if number > 0]
    wide = len(positive) == len(curve.values) and bool(positive) and max(positive) > WIDE * min(positive)
    log = bool(positive) and (log or wide)
    drawn = _positive(curve) if log else curve
    zeros = [step for step, number in zip(curve.steps, curve.values, strict=True) if number <= 0] if log else []
    title = name + _key("&#9650; NaN or infinite", curve.nonfinite) + _key("&#9660; zero", zeros)
    axis = _axis(title, drawn.values, log=log, crowded=bool(curve.nonfinite))
    draw_curve(figure, row, drawn, axis=axis, hover=[f"{name} {value(number)}" for number in drawn.values])
    draw_edge(figure, row, curve.nonfinite, alarm)
    draw_edge(figure, row, zeros, f"{name} was 0", at=BOTTOM)


def draw_scale(figure: go.Figure, row: int, curve: Curve) -> None:
    """A loss scale as steps on an axis of powers of two; a scale of 0 is marked at the bottom edge."""
    low, high = (min(curve.values), max(curve.values)) if curve.values else (0.0, 1.0)
    low, high = math.floor(low) - 1, math.ceil(high) + 1
    stride = next((stride for stride in _STRIDES if (high - low) / stride <= _LABELS), _STRIDES[-1])
    ticks = tuple(float(tick) for tick in range(low, high + 1) if tick % stride == 0)
    labels = tuple(f"2<sup>{tick:.0f}</sup>" for tick in ticks)
    title = "loss scale" + _key("&#9660; zero", curve.nonfinite)
    axis = Axis(title=title, low=low - 0.3, high=high + 0.3, ticks=ticks, labels=labels)
    words = [f"loss scale {in_words(2.0**power)}" for power in curve.values]
    draw_curve(figure, row, curve, axis=axis, hover=words, shape="hvh")
    draw_edge(figure, row, curve.nonfinite, "the loss scale was 0", at=BOTTOM)


def draw_counter(figure: go.Figure, row: int, curve: Curve, name: str, *, target: float | None = None) -> None:
    """A counter from 0 that climbs towards ``target``, which is drawn as a line where it is near."""
    high = max(curve.values, default=1.0)
    near = target is not None and target <= 4 * max(high, 1.0)
    top = max(high, target or 0.0) if near else high
    axis = Axis(title=name, low=0.0, high=1.15 * max(top, 1.0))
    draw_curve(figure, row, curve, axis=axis, hover=[f"{name} {number:,.0f}" for number in curve.values], shape="hvh")
    if near and target is not None:
        _draw_target(figure, row, target)


def _draw_target(figure: go.Figure, row: int, target: float) -> None:
    figure.add_hline(
        y=target,
        row=row,
        col=1,
        line={"dash": "dot", "width": 1, "color": MARK},
        annotation={"text": f"grows at {target:,.0f}", "xanchor": "right", "yanchor": "bottom", "showarrow": False},
        exclude_empty_subplots=False,
    )


def _key(words: str, marks: Sequence[int]) -> str:
    """What a panel's edge marks mean, said in its title where there are any."""
    return f"   <span style='color:{ALARM}'>{words}</span>" if marks else ""


def _positive(curve: Curve) -> Curve:
    kept = [(step, number) for step, number in zip(curve.steps, curve.values, strict=True) if number > 0]
    return Curve(steps=tuple(step for step, _ in kept), values=tuple(number for _, number in kept))


def _axis(title: str, values: Sequence[float], *, log: bool, crowded: bool) -> Axis:
    """Bounds with a little air, and room at the top for marks where there are any."""
    if not values:
        return Axis(title=title, low=0.0, high=1.0, ticks=(0.5,), labels=("",))
    headroom = 0.3 if crowded else 0.08
    low, high = (math.log10(min(values)), math.log10(max(values))) if log else (min(values), max(values))
    extent = high - low or (0.5 if log else max(abs(high), 1.0) * 0.1)
    low, high = low - 0.1 * extent, high + headroom * extent
    if not log:
        return Axis(title=title, low=low, high=high)
    ticks = _log_ticks(low, high)
    return Axis(title=title, low=10**low, high=10**high, log=True, ticks=ticks, labels=tuple(map(value, ticks)))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten between two exponents; where there are few of them finer numbers, at last the ends themselves."""
    stride = max(1, math.ceil((high - low) / _LABELS))
    powers = [power for power in range(math.floor(low), math.ceil(high) + 1) if power % stride == 0]
    for digits in _DIGITS:
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        inside = [tick for tick in ticks if low <= math.log10(tick) <= high]
        if len(inside) > 1:
            return tuple(inside)
    return (10**low, 10 ** ((low + high) / 2), 10**high)
