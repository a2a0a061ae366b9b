"""Draws panels and lanes over steps as HTML with SVG curves: as wide as the page, its text as large as the page's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ampscope.report.html.figures.panels import Edge, Panel
from ampscope.report.html.figures.timeline import Lane, Stack
from ampscope.report.html.markup import as_html
from ampscope.report.html.phrases import value

#: Units of the SVG's own coordinates, which are stretched over the page.
_UNITS = 1000
_GLYPHS = {
    "x": "\N{MULTIPLICATION X}",
    "diamond": "\N{BLACK DIAMOND}",
    "circle-open": "\N{WHITE CIRCLE}",
    "triangle-down": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "triangle-up": "\N{BLACK UP-POINTING TRIANGLE}",
    "star": "\N{BLACK STAR}",
    "square-open": "\N{WHITE SQUARE}",
    "diamond-open": "\N{WHITE DIAMOND}",
}
#: A lane with more marks than this gets lines instead of glyphs.
_GLYPHS_AT_MOST = 60
#: Labels along the steps and, at most, up an axis.
_STEP_TICKS, _VALUE_TICKS = 6, 4


@dataclass(frozen=True, slots=True)
class _Extent:
    """The steps that the figure covers."""

    first: int
    last: int

    def at(self, step: float) -> float:
        """Where a step stands, from 0 at the left to 1 at the right."""
        return (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5


def stack_html(stack: Stack, label: str) -> str:
    """The figure; ``label`` says what it shows to those who do not see it."""
    extent = _extent(stack)
    panels = "".join(_panel(panel, stack, extent) for panel in stack.panels)
    lanes = "".join(_lane(lane, extent) for lane in stack.lanes)
    axis = "".join(
        f'<span style="left:{100 * extent.at(tick):.2f}%">{tick:,.0f}</span>'
        for tick in nice_ticks(extent.first, extent.last, _STEP_TICKS, whole=True)
    )
    foot = f'<div class="amp-plot"><div></div><div class="amp-steps">{axis}</div></div>'
    return (
        f'<figure class="amp-stack" role="group" aria-label="{as_html(label)}">{panels}{lanes}{foot}'
        '<figcaption class="amp-place">optimizer step</figcaption></figure>'
    )


def nice_ticks(low: float, high: float, count: int, *, whole: bool = False) -> tuple[float, ...]:
    """At most about ``count`` round numbers between two bounds."""
    if not high > low:
        return (low,)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    stride = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= raw)
    stride = max(stride, 1.0) if whole else stride
    start = math.ceil(low / stride - 1e-9)
    ticks = (number * stride for number in range(start, start + 2 * count + 2))
    return tuple(tick for tick in ticks if tick <= high + 1e-9 * stride)


def _extent(stack: Stack) -> _Extent:
    seen = [step for panel in stack.panels for step in _ends(panel)]
    seen += [step for lane in stack.lanes for span in lane.spans for step in span]
    return _Extent(min(seen, default=0), max(seen, default=0))


def _ends(panel: Panel) -> Iterator[int]:
    for steps in (panel.curve.steps, panel.above.steps, panel.below.steps):
        yield from (*steps[:1], *steps[-1:])


def _panel(panel: Panel, stack: Stack, extent: _Extent) -> str:
    keys = _key("\N{BLACK UP-POINTING TRIANGLE}", panel.above) + _key("\N{BLACK DOWN-POINTING TRIANGLE}", panel.below)
    ticks = _ticks(panel)
    labels = "".join(f'<span style="bottom:{100 * at:.1f}%">{as_html(text)}</span>' for at, text in ticks)
    grid = "".join(f'<path class="grid" d="M0 {_down(at)}H{_UNITS}"/>' for at, _ in ticks)
    lines = "".join(f'<path class="moment" d="M{_across(extent.at(step))} 0V{_UNITS}"/>' for step in stack.lines)
    marks = _edge(panel.above, extent, "top") + _edge(panel.below, extent, "bottom")
    return (
        f'<div class="amp-panel-name">{as_html(panel.name)}{keys}</div>'
        f'<div class="amp-plot"><div class="amp-ticks">{labels}</div><div class="amp-canvas">'
        f"{_svg(grid + lines + _target(panel) + _curve(panel, extent))}{_dot(panel, extent)}{marks}</div></div>"
    )


def _svg(content: str) -> str:
    return f'<svg viewBox="0 0 {_UNITS} {_UNITS}" preserveAspectRatio="none" aria-hidden="true">{content}</svg>'


def _key(symbol: str, edge: Edge) -> str:
    return f' <span class="amp-key">{symbol} {as_html(edge.key)}</span>' if edge.steps else ""


def _ticks(panel: Panel) -> list[tuple[float, str]]:
    axis = panel.axis
    numbers = axis.ticks or nice_ticks(axis.low, axis.high, _VALUE_TICKS)
    labels = axis.labels or tuple(map(value, numbers))
    placed = [(axis.place(number), label) for number, label in zip(numbers, labels, strict=True)]
    return [(at, label) for at, label in placed if 0 <= at <= 1]


def _curve(panel: Panel, extent: _Extent) -> str:
    drawn = ("L".join(_points(piece, panel, extent)) for piece in panel.pieces)
    return "".join(f'<path class="curve" d="M{points}"/>' for points in drawn)


def _points(piece: list[tuple[int, float]], panel: Panel, extent: _Extent) -> Iterator[str]:
    before = None
    for step, number in piece:
        height = _down(panel.axis.place(number))
        if panel.stepped and before is not None and before[1] != height:
            middle = _across(extent.at((before[0] + step) / 2))
            yield f"{middle} {before[1]}"
            yield f"{middle} {height}"
        yield f"{_across(extent.at(step))} {height}"
        before = step, height
    if len(piece) == 1:  # a stroke of no length is a dot where its ends are round
        yield f"{_across(extent.at(step))} {height}"


def _dot(panel: Panel, extent: _Extent) -> str:
    """A curve of one point."""
    if len(panel.curve.steps) != 1:
        return ""
    step, number = panel.curve.steps[0], panel.curve.values[0]
    place = f"left:{100 * extent.at(step):.2f}%;bottom:{100 * panel.axis.place(number):.1f}%"
    return f'<span class="amp-dot" style="{place}"></span>'


def _target(panel: Panel) -> str:
    return f'<path class="moment" d="M0 {_down(panel.axis.place(panel.target))}H{_UNITS}"/>' if panel.target else ""


def _edge(edge: Edge, extent: _Extent, side: str) -> str:
    glyph = "\N{BLACK UP-POINTING TRIANGLE}" if side == "top" else "\N{BLACK DOWN-POINTING TRIANGLE}"
    steps = _spread(edge.steps, extent)
    return "".join(
        f'<span class="amp-edge {side}" style="left:{100 * extent.at(step):.2f}%" '
        f'title="step {step:,}: {as_html(edge.told)}">{glyph}</span>'
        for step in steps
    )


def _spread(steps: Sequence[int], extent: _Extent) -> list[int]:
    """The first of the steps that would stand on one spot."""
    return list({round(4 * _GLYPHS_AT_MOST * extent.at(step)): step for step in reversed(steps)}.values())[::-1]


def _lane(lane: Lane, extent: _Extent) -> str:
    glyph = _GLYPHS.get(lane.symbol)
    crowded = glyph is None or len(lane.spans) > _GLYPHS_AT_MOST
    drawn = _ranges(lane, extent, crowded=crowded) + ("" if crowded else _glyphs(lane, glyph or "", extent))
    return (
        f'<div class="amp-plot amp-lane"><div class="amp-ticks">{as_html(lane.name)}</div>'
        f'<div class="amp-canvas" style="color:{lane.color}">{drawn}</div></div>'
    )


def _ranges(lane: Lane, extent: _Extent, *, crowded: bool) -> str:
    """Lines from first to last step; where glyphs have no room also a stroke at each first step."""
    middle = _UNITS // 2
    bars = [(extent.at(first), extent.at(last)) for first, last in lane.spans if last > first]
    path = "".join(f"M{_across(start)} {middle}H{_across(end)}" for start, end in bars)
    if crowded:
        starts = dict.fromkeys(_across(extent.at(first)) for first, _ in lane.spans)
        path += "".join(f"M{start} 150V850" for start in starts)
    return _svg(f'<path class="mark" d="{path}"/>') if path else ""


def _glyphs(lane: Lane, glyph: str, extent: _Extent) -> str:
    texts = lane.texts or ((lane.name,),) * len(lane.spans)
    return "".join(
        f'<span class="amp-glyph" style="left:{100 * extent.at(first):.2f}%" '
        f'title="step {first:,}: {as_html(", ".join(lines))}">{glyph}</span>'
        for (first, _), lines in zip(lane.spans, texts, strict=True)
    )


def _across(at: float) -> str:
    return f"{_UNITS * at:.1f}".removesuffix(".0")


def _down(at: float) -> str:
    return f"{_UNITS * (1 - at):.1f}".removesuffix(".0")
