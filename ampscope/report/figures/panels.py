"""The panels over steps: which values, on which axis, and what cannot stand on it."""

from __future__ import annotations

from ampscope.analysis.numerics.arrays import Curve
from ampscope.analysis.words import in_words
from ampscope.report.figures.axis import WIDE, linear_axis, measure_axis, scale_axis
from ampscope.report.figures.stack import Edge, Panel, Symbol
from ampscope.report.numbers import count, value

#: A counter's target is drawn where it is at most this many times as far as the counter came.
_NEAR = 4
#: Room above a counter.
_AIR = 1.15
#: Columns of a sparkline, its height in units, and what stands for a column with a value that is not finite.
COLUMNS, HEIGHT, BAD = 32, 100, -1


def measure_panel(curve: Curve, name: str, alarm: str, *, log: bool = False) -> Panel:
    """A measured value; what is not finite stands at the top edge, a zero on a logarithmic axis at the bottom.

    Args:
        curve: The values.
        name: What they are.
        alarm: What is said of a step whose value is not finite.
        log: Whether the axis is logarithmic even where the values lie close together.
    """
    positive = [number for number in curve.values if number > 0]
    wide = len(positive) == len(curve.values) and bool(positive) and max(positive) > WIDE * min(positive)
    log = bool(positive) and (log or wide)
    drawn = _positive(curve) if log else curve
    zeros = [step for step, number in zip(curve.steps, curve.values, strict=True) if number <= 0] if log else []
    return Panel(
        name=name,
        curve=drawn,
        axis=measure_axis(drawn.values, log=log, crowded=bool(curve.nonfinite)),
        hover=lambda number: f"{name} {value(number)}",
        above=Edge(symbol=Symbol.UP, steps=curve.nonfinite, key="NaN or infinite", hover=alarm),
        below=Edge(symbol=Symbol.DOWN, steps=tuple(zeros), key="zero", hover=f"{name} was 0"),
    )


def scale_panel(curve: Curve) -> Panel:
    """A loss scale, given by its base-2 logarithm, on an axis of powers of two; a scale of 0 stands at the bottom."""
    return Panel(
        name="loss scale",
        curve=curve,
        axis=scale_axis(curve),
        hover=lambda power: f"loss scale {in_words(2.0**power)}",
        stepped=True,
        below=Edge(symbol=Symbol.DOWN, steps=curve.nonfinite, key="zero", hover="the loss scale was 0"),
    )


def counter_panel(curve: Curve, name: str, *, target: float | None = None) -> Panel:
    """A counter from 0 that climbs towards ``target``, which is drawn as a line where it is near."""
    high = max(curve.values, default=1.0)
    near = target is not None and target <= _NEAR * max(high, 1.0)
    top = max(high, target or 0.0) if near else high
    return Panel(
        name=name,
        curve=curve,
        axis=linear_axis(0.0, _AIR * max(top, 1.0)),
        hover=lambda number: f"{name} {count(number)}",
        stepped=True,
        target=target if near else None,
        target_words=f"grows at {target:,.0f}" if near else "",
    )


def sparkline(curve: Curve) -> tuple[int, ...]:
    """The height of each column, 0 to 100, by the last value of its steps; -1 where one was not finite.

    Args:
        curve: The values, thinned or not.
    """
    steps = [*curve.steps, *curve.nonfinite]
    if not steps:
        return ()
    first, extent = min(steps), max(steps) - min(steps) + 1
    columns = min(COLUMNS, extent)
    known = {(step - first) * columns // extent: at for at, step in enumerate(curve.steps)}
    bad = {(step - first) * columns // extent for step in curve.nonfinite}
    low, high = min(curve.values, default=0.0) / 2, max(curve.values, default=0.0) / 2  # halves: none overflows
    drawn, height = [], HEIGHT // 2
    for column in range(columns):
        if column in known and high > low:
            height = round((curve.values[known[column]] / 2 - low) / (high - low) * HEIGHT)
        drawn.append(BAD if column in bad else height)
    return tuple(drawn)


def _positive(curve: Curve) -> Curve:
    kept = [(step, number) for step, number in zip(curve.steps, curve.values, strict=True) if number > 0]
    return Curve(steps=tuple(step for step, _ in kept), values=tuple(number for _, number in kept))
