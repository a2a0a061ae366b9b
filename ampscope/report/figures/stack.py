"""A figure over optimizer steps is made of panels, whose values stand on axes, and of lanes of marks at the foot."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from ampscope.analysis.arrays import Curve
from ampscope.analysis.words import in_words
from ampscope.report.figures.axis import WIDE, Axis, linear_axis, measure_axis, scale_axis, step_axis
from ampscope.report.numbers import count, value


class Symbol(StrEnum):
    """A mark, by the name that Plotly has for it."""

    CROSS = "x"
    DIAMOND = "diamond"
    OPEN_CIRCLE = "circle-open"
    DOWN = "triangle-down"
    UP = "triangle-up"
    STAR = "star"
    OPEN_SQUARE = "square-open"
    OPEN_DIAMOND = "diamond-open"
    STROKE = "line-ns"

    @property
    def glyph(self) -> str:
        """The mark as a character; empty where there is none."""
        return _GLYPHS.get(self, "")


_GLYPHS = {
    Symbol.CROSS: "\N{MULTIPLICATION X}",
    Symbol.DIAMOND: "\N{BLACK DIAMOND}",
    Symbol.OPEN_CIRCLE: "\N{WHITE CIRCLE}",
    Symbol.DOWN: "\N{BLACK DOWN-POINTING TRIANGLE}",
    Symbol.UP: "\N{BLACK UP-POINTING TRIANGLE}",
    Symbol.STAR: "\N{BLACK STAR}",
    Symbol.OPEN_SQUARE: "\N{WHITE SQUARE}",
    Symbol.OPEN_DIAMOND: "\N{WHITE DIAMOND}",
}


@dataclass(frozen=True, slots=True)
class Heights:
    """How tall the parts of a stack are, in pixels."""

    panel: int
    lane: int


#: On a page there is room to zoom in; of a report several panels go onto a sheet of paper.
PAGE_HEIGHTS, REPORT_HEIGHTS = Heights(panel=140, lane=26), Heights(panel=104, lane=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Steps whose value has no place on a panel's axis: they are marked at its top or bottom."""

    symbol: Symbol
    steps: tuple[int, ...] = ()
    key: str = ""  #: what the mark means, beside the panel's name
    hover: str = ""  #: what it says of one step
    harmless: frozenset[int] = frozenset()  #: those of the steps that are no alarm

    @property
    def is_calm(self) -> bool:
        """Whether no mark is an alarm."""
        return self.harmless.issuperset(self.steps)


#: Steps and values that a line joins.
Piece = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A value by step, of one run or of two."""

    name: str
    curve: Curve
    axis: Axis
    hover: Callable[[float], str]  #: what a value of the curve says
    stepped: bool = False
    above: Edge = Edge(symbol=Symbol.UP)
    below: Edge = Edge(symbol=Symbol.DOWN)
    target: float | None = None
    target_words: str = ""
    other: Curve | None = None  #: the same of a second run, on the same axis
    sides: tuple[str, str] = ("", "")  #: what the two runs are called

    @property
    def pieces(self) -> list[Piece]:
        """Step and value of the curve, in pieces: it is broken where a step's value stands at an edge."""
        return _pieces(self.curve, [*self.above.steps, *self.below.steps])

    @property
    def other_pieces(self) -> list[Piece]:
        """Step and value of the second curve, in pieces: it is broken where a value was not finite."""
        return _pieces(self.other, []) if self.other is not None else []

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges that have a mark."""
        return tuple(edge for edge in (self.above, self.below) if edge.steps)


def _pieces(curve: Curve, edges: Sequence[int]) -> list[Piece]:
    breaks = sorted({*edges, *curve.nonfinite})
    points = zip(curve.steps, curve.values, strict=True)
    return [list(piece) for _, piece in groupby(points, lambda point: bisect(breaks, point[0]))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of marks; each mark spans from a first to a last step."""

    name: str
    symbol: Symbol
    color: str
    spans: tuple[tuple[int, int], ...]
    hovers: tuple[tuple[str, ...], ...]  #: for each span, lines of plain text
    sparse: frozenset[int] = frozenset()  #: numbers of the spans of which some steps alone are meant, not each


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Panels with a common axis of steps above each other, lanes at the foot, and vertical lines through all."""

    label: str  #: what it shows, for those who do not see it
    panels: tuple[Panel, ...] = ()
    lanes: tuple[Lane, ...] = ()
    lines: tuple[int, ...] = ()
    marked: int | None = None  #: the step that the reader came for

    @property
    def axis(self) -> Axis:
        """The steps that the figure covers."""
        return step_axis([*self._ends(), *(step for lane in self.lanes for span in lane.spans for step in span)])

    def _ends(self) -> Iterator[int]:
        for panel in self.panels:
            others = panel.other.steps if panel.other is not None else ()
            for steps in (panel.curve.steps, others, panel.above.steps, panel.below.steps):
                yield from (*steps[:1], *steps[-1:])


#: What stands under the common axis.
AXIS_NAME = "optimizer step"


def step_words(step: int) -> str:
    """The step that a mark stands at."""
    return f"step {step:,}"


def at_every_step(steps: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Marks that span one step each."""
    return tuple((step, step) for step in steps)


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
