"""Paints panels and lanes over steps as HTML with SVG curves: as wide as the page, its text as large as the page's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ampscope.report.figures.axis import Axis
from ampscope.report.figures.stack import AXIS_NAME, REPORT_HEIGHTS, Edge, Lane, Panel, Stack, step_words
from ampscope.report.html.markup import as_html, labels_html

#: Units of the SVG's own coordinates, which are stretched over the page.
_UNITS = 1000
#: Without a zoom, more marks than this in a lane run into each other: they are strokes then.
_MOST_GLYPHS = 60
#: In these units, to the right and down.
Point = tuple[int, int]


def stack_html(stack: Stack) -> str:
    """Paints a figure over optimizer steps as HTML."""
    steps = stack.axis
    panels = "".join(_panel(panel, stack, steps) for panel in stack.panels)
    lanes = "".join(_lane(lane, steps) for lane in stack.lanes)
    foot = f'<div class="amp-plot"><div></div><div class="amp-steps">{labels_html(steps.labelled)}</div></div>'
    marked = "" if stack.marked is None else f"; the line: {step_words(stack.marked)}"
    heights = f"--panel:{REPORT_HEIGHTS.panel}px;--lane:{REPORT_HEIGHTS.lane}px"
    return (
        f'<figure class="amp-stack" style="{heights}" aria-label="{as_html(stack.label)}">'
        f'{panels}{lanes}{foot}<figcaption class="amp-place">{AXIS_NAME}{marked}</figcaption></figure>'
    )


def _panel(panel: Panel, stack: Stack, steps: Axis) -> str:
    axis = panel.axis
    keys = "".join(
        f' <span class="amp-key{" calm" if edge.is_calm else ""}">{edge.symbol.glyph} {as_html(edge.key)}</span>'
        for edge in panel.edges
    )
    labels = "".join(f'<span style="bottom:{at:.1f}%">{as_html(label)}</span>' for at, label in axis.labelled)
    grid = "".join(f'<path class="grid" d="M0 {_down(axis.place(tick))}H{_UNITS}"/>' for tick in axis.ticks)
    svg = _svg(grid + _lines(stack, steps) + _target(panel) + _curve(panel, steps))
    marks = _edge(panel.above, steps, "top") + _edge(panel.below, steps, "bottom")
    return (
        f'<div class="amp-panel-name">{as_html(panel.name)}{keys}</div>'
        f'<div class="amp-plot"><div class="amp-ticks">{labels}</div><div class="amp-canvas">'
        f"{svg}{_dot(panel, steps)}{marks}</div></div>"
    )


def _lines(stack: Stack, steps: Axis) -> str:
    marked = () if stack.marked is None else (("marked", stack.marked),)
    lines = (*(("moment", step) for step in stack.lines), *marked)
    return "".join(f'<path class="{kind}" d="M{_across(steps.place(step))} 0V{_UNITS}"/>' for kind, step in lines)


def _svg(content: str) -> str:
    return f'<svg viewBox="0 0 {_UNITS} {_UNITS}" preserveAspectRatio="none" aria-hidden="true">{content}</svg>'


def _curve(panel: Panel, steps: Axis) -> str:
    both = (("curve", panel.pieces), ("curve other", panel.other_pieces))
    drawn = ((kind, _path(list(_points(piece, panel, steps)))) for kind, pieces in both for piece in pieces)
    return "".join(f'<path class="{kind}" d="{path}"/>' for kind, path in drawn)


def _points(piece: Sequence[tuple[int, float]], panel: Panel, steps: Axis) -> Iterator[Point]:
    before = None
    for step, number in piece:
        height = round(_UNITS * (1 - panel.axis.place(number)))
        if panel.stepped and before is not None and before[1] != height:
            middle = round(_UNITS * steps.place((before[0] + step) / 2))
            yield middle, before[1]
            yield middle, height
        yield round(_UNITS * steps.place(step)), height
        before = step, height


def _path(points: Sequence[Point]) -> str:
    """The way through the points in few characters: each move from the one before, level stretches as one."""
    start, drawn, level = points[0], [], 0
    for (x0, y0), (x1, y1) in pairwise(points):
        level += x1 - x0 if y1 == y0 else 0
        if y1 != y0:
            drawn += [f"h{level}"] if level else []
            drawn.append(f"l{x1 - x0} {y1 - y0}" if x1 != x0 else f"v{y1 - y0}")
            level = 0
    # a stroke of no length is a dot where its ends are round
    return f"M{start[0]} {start[1]}{''.join(drawn)}{f'h{level}' if level or not drawn else ''}".replace(" -", "-")


def _dot(panel: Panel, steps: Axis) -> str:
    if len(panel.curve.steps) != 1:
        return ""
    step, number = panel.curve.steps[0], panel.curve.values[0]
    place = f"left:{_percent(steps, step)};bottom:{panel.axis.percent(number):.1f}%"
    return f'<span class="amp-dot" style="{place}"></span>'


def _target(panel: Panel) -> str:
    if panel.target is None:
        return ""
    return f'<path class="moment" d="M0 {_down(panel.axis.place(panel.target))}H{_UNITS}"/>'


def _edge(edge: Edge, steps: Axis, side: str) -> str:
    calm = ' class="calm"'
    marks = "".join(
        f'<i{calm if step in edge.harmless else ""} style="left:{_percent(steps, step)}" '
        f'title="{step_words(step)}">{edge.symbol.glyph}</i>'
        for step in _apart(edge.steps, steps)
    )
    return f'<div class="amp-edge {side}">{marks}</div>' if marks else ""


def _apart(marked: Sequence[int], steps: Axis) -> list[int]:
    """The first of the steps that would stand on one spot."""
    return list({round(4 * _MOST_GLYPHS * steps.place(step)): step for step in reversed(marked)}.values())[::-1]


def _lane(lane: Lane, steps: Axis) -> str:
    crowded = not lane.symbol.glyph or len(lane.spans) > _MOST_GLYPHS
    drawn = _ranges(lane, steps, crowded=crowded) + ("" if crowded else _glyphs(lane, steps))
    return (
        f'<div class="amp-plot amp-lane"><div class="amp-ticks">{as_html(lane.name)}</div>'
        f'<div class="amp-canvas" style="color:{lane.color}">{drawn}</div></div>'
    )


def _ranges(lane: Lane, steps: Axis, *, crowded: bool) -> str:
    """Lines from first to last step; where glyphs have no room also a stroke at each first step."""
    bars = {False: "", True: ""}  # of each step, and of some alone
    for at, (first, last) in enumerate(lane.spans):
        if last > first:
            bars[at in lane.sparse] += f"M{_across(steps.place(first))} {_UNITS // 2}H{_across(steps.place(last))}"
    if crowded:
        starts = dict.fromkeys(_across(steps.place(first)) for first, _ in lane.spans)
        bars[False] += "".join(f"M{start} 150V850" for start in starts)
    drawn = (f'<path class="mark{" some" * sparse}" d="{path}"/>' for sparse, path in bars.items() if path)
    return _svg("".join(drawn)) if any(bars.values()) else ""


def _glyphs(lane: Lane, steps: Axis) -> str:
    return "".join(
        f'<span class="amp-glyph" style="left:{_percent(steps, first)}" '
        f'title="{_hover(first, hover)}">{lane.symbol.glyph}</span>'
        for (first, _), hover in zip(lane.spans, lane.hovers, strict=True)
    )


def _hover(step: int, lines: Sequence[str]) -> str:
    return f"{step_words(step)}: {as_html(', '.join(lines))}"


def _percent(steps: Axis, step: float) -> str:
    return f"{steps.percent(step):.2f}%"


def _across(at: float) -> str:
    return f"{_UNITS * at:.1f}".removesuffix(".0")


def _down(at: float) -> str:
    return f"{_UNITS * (1 - at):.1f}".removesuffix(".0")
