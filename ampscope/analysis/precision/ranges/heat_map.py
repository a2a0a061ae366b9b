"""A heat map of ranges: modules by sampled steps, in each cell what is closest to the end of its dtype there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ampscope.analysis.arrays import BoolArray, FloatArray, IntArray
from ampscope.analysis.precision.ranges.measured import NEAR_BITS, MeasuredPlace, MeasuredRun
from ampscope.analysis.precision.ranges.places import SampledStretch, ValueKind

#: Rows of a heat map: of more, those that are closest.
MOST_ROWS = 60
#: Rows up to which a folding says too little.
_FEW = 5


class Measure(StrEnum):
    """Names the measures that a cell can show."""

    HEADROOM = "headroom"  #: factors of two between the largest magnitude and overflow
    UNDERFLOW = "underflow"  #: those between it and the dtype's smallest normal number; negative below it
    SUBNORMAL = "subnormal"  #: the share of subnormal ones among the elements that are not zero


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Describes what a heat map is to show."""

    group: ValueKind = ValueKind.FORWARD  #: of which values
    measure: Measure = Measure.HEADROOM
    depth: int | None = None  #: how many names deep modules have a row of their own; None for as deep as rows fit
    closest_first: bool = False  #: by how close each row came, without the modules that hold others; else as a tree
    most: int = MOST_ROWS  #: rows; of more, those that are closest


WHOLE = View()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeatRow:
    """A module with what is below it; each array has an element for each column."""

    module: str  #: qualified; empty for what runs outside every module, and for the model itself
    depth: int
    folded: int  #: modules below it that have no row of their own
    values: FloatArray  #: of the closest place; NaN where nothing was measured
    closest: IntArray  #: the place, by its position in `MeasuredRun.places`; -1 for none
    near: BoolArray  #: whether a place that may overflow was near it
    overflowed: BoolArray  #: whether results became infinite there
    worst: int  #: the column in which it came closest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeatMap:
    """Modules by stretches of sampled steps."""

    measure: Measure
    group: ValueKind
    depth: int  #: of the module names that have a row of their own
    deepest: int  #: of all module names
    columns: tuple[SampledStretch, ...] = ()
    rows: tuple[HeatRow, ...] = ()
    left_out: int = 0  #: rows that are farther than those


def heat_map(found: MeasuredRun, view: View = WHOLE) -> HeatMap:
    """The heat map of what was measured on one rank, with all its sampled steps summed up."""
    measure, closest_first = view.measure, view.closest_first
    chosen = [number for number, each in enumerate(found.places) if _is_shown(each, view.group, measure)]
    modules = [found.places[number].place.module for number in chosen]
    deepest = max((len(_names(module)) for module in modules), default=1)
    depth = _fitting(modules, deepest, view.most) if view.depth is None else min(max(view.depth, 1), deepest)
    places = _Places(found, chosen, measure)
    below = _below(modules, depth, with_parents=not closest_first)
    rows = [_row(places, module, own, modules, depth) for module, own in below.items()]
    rows = [row for row in rows if (row.closest >= 0).any()]
    ranked = sorted(range(len(rows)), key=lambda number: _nearness(rows[number], measure))
    kept = ranked[: view.most] if closest_first else sorted(ranked[: view.most])
    return HeatMap(
        measure=measure,
        group=view.group,
        depth=depth,
        deepest=deepest,
        columns=found.cells.stretches if rows else (),
        rows=tuple(rows[number] for number in kept),
        left_out=len(rows) - len(kept),
    )


def groups(found: MeasuredRun) -> tuple[ValueKind, ...]:
    """The kinds of values of which anything was measured."""
    known = {each.place.group for each in found.places}
    return tuple(group for group in ValueKind if group in known)


def _is_shown(each: MeasuredPlace, group: ValueKind, measure: Measure) -> bool:
    """Whether a place is on the map: one that cannot grow has no headroom to show, unless it overflowed."""
    if each.place.group != group:
        return False
    return measure is not Measure.HEADROOM or not each.fixed or bool(each.overflows)


class _Places:
    def __init__(self, found: MeasuredRun, chosen: Sequence[int], measure: Measure) -> None:
        self.numbers = np.array(chosen, np.int64)
        places = [found.places[number] for number in chosen]
        self.columns = len(found.cells.stretches)
        rows = np.array([each.seen.number for each in places], np.int64)
        heights = found.cells.heights[rows] if len(rows) else np.empty((0, self.columns))
        tops = np.array([[math.log2(each.place.format.max)] for each in places]).reshape(-1, 1)
        headroom = np.maximum(tops - heights, 0.0)
        self.overflowed = np.zeros(headroom.shape, np.bool_)
        begins = [each.first for each in found.cells.stretches]
        for number, each in enumerate(places):
            self.overflowed[number, np.searchsorted(begins, each.overflows, side="right") - 1] = True
        may = np.array([[each.may_overflow] for each in places], np.bool_).reshape(-1, 1)
        self.near: BoolArray = may & (headroom < NEAR_BITS)
        self.values = _values(found, places, rows, measure, np.where(self.overflowed, 0.0, headroom))
        #: The less, the closer.
        self.score = _score(self.values, measure) - (self.overflowed if measure is Measure.HEADROOM else 0.0)


def _values(
    found: MeasuredRun, places: Sequence[MeasuredPlace], rows: IntArray, measure: Measure, headroom: FloatArray
) -> FloatArray:
    if measure is Measure.HEADROOM or not len(rows):
        return headroom
    if measure is Measure.SUBNORMAL:
        return found.cells.subnormal[rows]
    normal = np.array([[float(each.place.format.normal)] for each in places])
    distance: FloatArray = found.cells.heights[rows] - normal
    return distance


def _score(values: FloatArray, measure: Measure) -> FloatArray:
    found: FloatArray = np.where(np.isnan(values), np.inf, -values if measure is Measure.SUBNORMAL else values)
    return found


def _row(places: _Places, module: str, own: Sequence[int], modules: Sequence[str], depth: int) -> HeatRow:
    score = places.score[own]
    closest, columns = score.argmin(axis=0), np.arange(places.columns)
    known = np.isfinite(score[closest, columns])
    picked = np.array(own, np.int64)[closest]
    return HeatRow(
        module=module,
        depth=max(len(_names(module)) - 1, 0),
        folded=len({modules[each] for each in own} - {module}) if len(_names(module)) == depth else 0,
        values=np.where(known, places.values[picked, columns], np.nan),
        closest=np.where(known, places.numbers[picked], -1),
        near=np.logical_or.reduce(places.near[own], axis=0),
        overflowed=np.logical_or.reduce(places.overflowed[own], axis=0),
        worst=int(score.min(axis=0).argmin()),
    )


def _nearness(row: HeatRow, measure: Measure) -> tuple[bool, float]:
    return not row.overflowed.any(), float(_score(row.values, measure).min())


def _names(module: str) -> list[str]:
    return module.split(".") if module else []


def _below(modules: Sequence[str], depth: int, *, with_parents: bool) -> dict[str, list[int]]:
    """Returns the places below each row, in the order of a tree whose branches come as they first ran."""
    below: dict[str, list[int]] = {}
    for number, module in enumerate(modules):
        for name in _ancestry(module, depth) if with_parents else (_folded(module, depth),):
            below.setdefault(name, []).append(number)
    return {name: below[name] for name in _tree(below)} if with_parents else below


def _folded(module: str, depth: int) -> str:
    return ".".join(_names(module)[:depth])


def _ancestry(module: str, depth: int) -> list[str]:
    names = _names(module)[:depth]
    return [".".join(names[: number + 1]) for number in range(len(names))] or [""]


def _tree(names: Iterable[str]) -> list[str]:
    """The names, each followed by those below it."""
    children: dict[str, list[str]] = {}
    known = list(names)
    for name in known:
        children.setdefault(name.rpartition(".")[0] if name else "-", []).append(name)
    found: list[str] = []
    ahead = [*children.get("-", []), *reversed(children.get("", []))]
    while ahead:
        name = ahead.pop()
        found.append(name)
        ahead += reversed(children.get(name, [])) if name else ()
    return found


def _fitting(modules: Sequence[str], deepest: int, most: int) -> int:
    """The largest depth at which all rows are shown; the next one where that tells next to nothing apart."""
    different = set(modules)
    for depth in range(deepest, 0, -1):
        rows = len({name for module in different for name in _ancestry(module, depth)})
        if rows <= most:
            return depth if rows >= min(_FEW, most) else min(depth + 1, deepest)
    return 1
