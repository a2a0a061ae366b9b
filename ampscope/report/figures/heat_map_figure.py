"""The figure of a heat map of ranges: shades, words and marks for every cell, whoever paints it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ampscope.analysis.arrays import FloatArray
from ampscope.analysis.precision.ranges.heat_map import HeatMap, HeatRow, Measure
from ampscope.analysis.precision.ranges.measured import MeasuredRun
from ampscope.analysis.precision.ranges.places import OpPlace, ValueKind
from ampscope.analysis.words import place_in_words, spanned
from ampscope.report.numbers import count, share
from ampscope.report.precision_words import bits
from ampscope.report.safe_text import short

#: The shade of a cell goes from the least to this.
FULL = 100
_LEAST = 10
#: Bits from which on there is plenty, whatever more there is: half of float16's.
PLENTY = 20
#: Characters of a whole name that there is room for.
_ROOM = 30
#: The least share of subnormal values with a shade of its own.
_LEAST_SHARE = 1e-4
#: Labels below the columns.
_TICKS = 6

#: What a heat map tells, in words: as a choice, and as the unit of its key.
MEASURES = {
    Measure.HEADROOM: ("headroom to overflow", "bits between the largest magnitude and overflow"),
    Measure.UNDERFLOW: ("distance to underflow", "bits between the largest magnitude and the smallest normal number"),
    Measure.SUBNORMAL: ("share of subnormal values", "share of the non-zero values that are subnormal"),
}
GROUPS = {
    ValueKind.FORWARD: "forward",
    ValueKind.BACKWARD: "backward, with the loss scale",
    ValueKind.GRADIENTS: "parameters' gradients, with the loss scale",
    ValueKind.WEIGHTS: "weights and buffers",
    ValueKind.STATE: "optimizer state",
}
_KEY = {
    Measure.HEADROOM: (0, 2, 4, 8, 12, 16, PLENTY),
    Measure.UNDERFLOW: (0, 2, 4, 8, 12, 16, PLENTY),
    Measure.SUBNORMAL: (0.0, 0.001, 0.01, 0.1, 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatFigureRow:
    """A module; each sequence has an element for each column."""

    name: str
    hint: str  #: the whole of what a narrow row cuts off
    depth: int
    shades: tuple[int | None, ...]  #: from 1 to `FULL`; None where nothing was measured
    words: tuple[int, ...]  #: what the cell tells, by its position in `HeatFigure.words`
    places: tuple[int, ...]  #: which place is closest, by its position in `HeatFigure.places`; -1 for none
    marks: tuple[int, ...]  #: 1 where a value was near overflow, 2 where results overflowed
    heights: tuple[int | None, ...]  #: of a small curve, from 0 to `FULL`, where the end of the dtype is
    worst: int  #: the column in which it came closest


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatFigure:
    """The figure of a heat map, ready to be painted."""

    label: str
    unit: str
    rows: tuple[HeatFigureRow, ...]
    words: tuple[str, ...]
    places: tuple[str, ...]  #: op, phase and dtype
    keys: tuple[str, ...]  #: of each place, its `OpPlace.key`
    columns: tuple[str, ...]  #: which steps a column stands for
    steps: tuple[int, ...]  #: the last of them
    ticks: tuple[tuple[float, str], ...]  #: by their place from 0 at the left to 1 at the right
    key: tuple[tuple[int, str], ...]  #: shades, and what they stand for
    marks: tuple[int, ...]  #: those that occur
    left_out: str = ""  #: what is not drawn, in words


def heat_figure(seen: HeatMap, found: MeasuredRun, *, as_tree: bool = True) -> HeatFigure:
    """The picture of a heat map.

    Args:
        seen: The heat map.
        found: What it was made of.
        as_tree: Whether its rows stand below the modules that hold them, so that a short name tells.
    """
    words, places = _Numbered[str](), _Numbered[int]()
    tell = _telling(seen.measure)
    rows = tuple(_row(row, seen, words, places, tell, as_tree=as_tree) for row in seen.rows)
    shown = [found.places[number].place for number in places.found]
    choice, unit = MEASURES[seen.measure]
    return HeatFigure(
        label=f"{choice.capitalize()} by module and sampled step",
        unit=unit,
        rows=rows,
        words=tuple(words.found),
        places=tuple(map(_place_words, shown)),
        keys=tuple(place.key for place in shown),
        columns=tuple(spanned("step", each.first, each.last) for each in seen.columns),
        steps=tuple(each.last for each in seen.columns),
        ticks=_ticks([each.first for each in seen.columns]),
        key=tuple((_shade(at, seen.measure), _tick_words(at, seen.measure)) for at in _KEY[seen.measure]),
        marks=tuple(sorted({mark for row in rows for mark in row.marks} - {0})),
        left_out=f"{count(seen.left_out, 'module')} farther away" if seen.left_out else "",
    )


T = TypeVar("T", str, int)


class _Numbered(Generic[T]):
    """Different things in the order in which they come, by number."""

    def __init__(self) -> None:
        self._known: dict[T, int] = {}

    def __getitem__(self, one: T) -> int:
        return self._known.setdefault(one, len(self._known))

    @property
    def found(self) -> list[T]:
        return list(self._known)


def _row(
    row: HeatRow,
    seen: HeatMap,
    words: _Numbered[str],
    places: _Numbered[int],
    tell: Callable[[float], str],
    *,
    as_tree: bool,
) -> HeatFigureRow:
    values, closest = row.values.tolist(), row.closest.tolist()
    marks = [2 if bad else 1 if near else 0 for bad, near in zip(row.overflowed, row.near, strict=True)]
    told = ["overflowed" if mark == 2 else tell(value) for value, mark in zip(values, marks, strict=True)]
    headroom = seen.measure is Measure.HEADROOM
    name = row.module or "outside modules"
    folded = f", with {count(row.folded, 'module')} in it" if row.folded else ""
    return HeatFigureRow(
        name=short(name.rpartition(".")[2], 60) if as_tree else _end_of(name),
        hint=short(f"{name}{folded}", 200),
        depth=row.depth if as_tree else 0,
        shades=tuple(
            None if place < 0 else _shade(at, seen.measure) for at, place in zip(values, closest, strict=True)
        ),
        words=tuple(words[each] for each in told),
        places=tuple(-1 if place < 0 else places[place] for place in closest),
        marks=tuple(marks if headroom else [0] * len(marks)),
        heights=_heights(row.values, seen.measure),
        worst=row.worst,
    )


def _end_of(name: str) -> str:
    """The end of a long name, which tells it from its neighbours."""
    return short(name, 200) if len(name) <= _ROOM else f"\N{HORIZONTAL ELLIPSIS}{short(name[-_ROOM:], 200)}"


def _heights(values: FloatArray, measure: Measure) -> tuple[int | None, ...]:
    """The course of a row as a small curve: what comes closer rises."""
    known = [value for value in values.tolist() if not math.isnan(value)]
    most = max([1.0 if measure is not Measure.SUBNORMAL else _LEAST_SHARE, *known])
    share_of = [math.nan if math.isnan(value) else min(max(value / most, 0.0), 1.0) for value in values.tolist()]
    rising = share_of if measure is Measure.SUBNORMAL else [1.0 - part for part in share_of]
    return tuple(None if math.isnan(part) else round(FULL * part) for part in rising)


def _shade(value: float, measure: Measure) -> int:
    """The closer, the fuller: evenly by bits, and by the logarithm of a share."""
    if measure is Measure.SUBNORMAL:
        part = math.log(max(value, _LEAST_SHARE) / _LEAST_SHARE) / -math.log(_LEAST_SHARE)
    else:
        part = 1.0 - max(value, 0.0) / PLENTY
    return round(_LEAST + (FULL - _LEAST) * min(max(part, 0.0), 1.0))


def headroom_shade(left: float) -> int:
    """The shade, up to `FULL`, of a result that has ``left`` bits before it overflows."""
    return _shade(left, Measure.HEADROOM)


def _telling(measure: Measure) -> Callable[[float], str]:
    if measure is Measure.SUBNORMAL:
        return lambda value: f"{share(value)} subnormal"
    if measure is Measure.UNDERFLOW:
        return lambda value: f"{bits(value)} bits above the smallest normal" if value >= 0 else "all subnormal"
    return lambda value: f"{bits(value)} bits of headroom"


def _tick_words(value: float, measure: Measure) -> str:
    if measure is Measure.SUBNORMAL:
        return share(value)
    return f"{value:.0f} or more" if value == PLENTY else f"{value:.0f}"


def _place_words(place: OpPlace) -> str:
    return short(f"{place_in_words(place.op, place.name)}, {place.phase}, {place.dtype}".replace(", ,", ","), 120)


def _ticks(steps: Sequence[int]) -> tuple[tuple[float, str], ...]:
    every = max(1, -(-len(steps) // _TICKS))
    return tuple(((at + 0.5) / len(steps), count(step)) for at, step in enumerate(steps) if at % every == 0)
