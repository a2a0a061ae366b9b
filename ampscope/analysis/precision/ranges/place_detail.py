"""One place close up: its magnitudes step by step, where they are going, and how its values lay in one step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ampscope.analysis.arrays import BoolArray, Columns, Curve, make_curve
from ampscope.analysis.precision.ranges.magnitudes import FEW, MagnitudeCourse, course_of, course_rows
from ampscope.analysis.precision.ranges.measured import MeasuredPlace, MeasuredRun
from ampscope.analysis.precision.ranges.places import OpPlace, SampledExecutions, place_of, sampled_steps
from ampscope.analysis.precision.ranges.ranges import RangeRow, range_row
from ampscope.analysis.results import Operand
from ampscope.analysis.tables.lazy_tables import collect_rows
from ampscope.forecast import Forecast
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Statistics, Table

#: Points of a course that are kept.
_POINTS = 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestValue:
    """Holds the largest value of a place in one step, with the op that gave it."""

    step: int
    source: str  #: which execution, as in ``ops.source``
    seq: int
    written: Operand  #: with its histogram of exponents where that was counted


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDetail:
    """One place close up."""

    row: RangeRow
    course: Curve  #: base-2 logarithm of the largest finite magnitude by sampled step; not finite where all was zero
    limit: float  #: logarithm of the dtype's largest number
    normal: float  #: that of its smallest normal number
    forecast: Forecast | None
    overflows: tuple[int, ...]  #: steps in which its results became infinite
    seen: LargestValue | None  #: the step that was asked for; None where nothing of it is left
    counted: LargestValue | None  #: that step, or the nearest one, with its histogram; None where none was counted


def place_detail(run: Run, found: MeasuredRun, key: str, *, step: int | None = None) -> PlaceDetail | None:
    """A place close up.

    Args:
        run: The run.
        found: What was measured of it.
        key: The place's `OpPlace.key`.
        step: The step to look at, or the sampled one before it; by default that of its largest value.

    Returns:
        None where there is no such place.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    return place_details(run, found, (key,), step=step).get(key)


def place_details(
    run: Run, found: MeasuredRun, keys: Collection[str], *, step: int | None = None
) -> dict[str, PlaceDetail]:
    """Several places close up, as `place_detail`, by their keys and in one look at the ops; those that there are."""
    sampled = sampled_steps(run, found.rank)
    by_optimizer: dict[int, dict[str, MeasuredPlace]] = {}
    for each in found.places:
        if (key := each.place.key) in keys:
            by_optimizer.setdefault(each.place.optimizer, {}).setdefault(key, each)
    told: dict[str, PlaceDetail] = {}
    for number, places in by_optimizer.items():
        own = [_rows_of(run, found.rank, each.place) for each in places.values()]
        rows = _course_rows(run, found.rank, sampled, number, own)
        for (key, each), mine in zip(places.items(), own, strict=True):
            course = course_of(rows.where(mine.among(rows)))
            where = f"{mine.where} AND {_sources(sampled, number)} AND {sampled.where}"
            told[key] = _detail(run, found, each, course, where=where, step=step)
    return told


def _detail(
    run: Run, found: MeasuredRun, each: MeasuredPlace, course: MagnitudeCourse, *, where: str, step: int | None
) -> PlaceDetail:
    """The place, of its course and of the condition that its rows meet."""
    at = _nearest(course.steps.tolist(), course.heights.tolist(), each, step)
    with_counts = None if at is None else min(course.counted, key=lambda one: (abs(one - at), one), default=None)
    return PlaceDetail(
        row=range_row(each, found.cells),
        course=make_curve(course.steps, course.heights, points=_POINTS),
        limit=float(np.log2(each.place.format.max)),
        normal=float(each.place.format.normal),
        forecast=each.forecast,
        overflows=tuple(dict.fromkeys(sorted(each.overflows))),
        seen=None if at is None else _seen(run, found.rank, each.place, where, at),
        counted=None if with_counts is None else _seen(run, found.rank, each.place, where, with_counts, counted=True),
    )


class _Own(NamedTuple):
    """The rows of a place, whatever they are from."""

    sites: Mapping[int, Sequence[int]]  #: by output

    @property
    def where(self) -> str:
        """The condition that selects the rows, in the query engine's words."""
        told = [f"site IN ({', '.join(map(str, sites))}) AND out = {out}" for out, sites in self.sites.items()]
        return f"({' OR '.join(told) or 'false'})"

    def among(self, rows: Columns) -> BoolArray:
        """Returns a mask of the given rows that are the place's."""
        found = np.zeros(len(rows), np.bool_)
        for out, sites in self.sites.items():
            found |= (rows.ints("out") == out) & np.isin(rows.ints("site"), sites)
        return found


def _rows_of(run: Run, rank: int, place: OpPlace) -> _Own:
    own: dict[int, list[int]] = {}
    for site in run.rows(Table.SITES, rank=rank):
        if site.op == place.op and site.module == place.module:
            for out in range(len(site.out_dtypes)):
                if place_of(site, out, place.optimizer) == place:
                    own.setdefault(out, []).append(site.site)
    return _Own(own)


def _sources(sampled: SampledExecutions, optimizer: int) -> str:
    own = ", ".join(f"'{source}'" for source, number in sampled.optimizers.items() if number == optimizer)
    return f"source IN ({own or repr('')})"


def _course_rows(run: Run, rank: int, sampled: SampledExecutions, optimizer: int, places: Sequence[_Own]) -> Columns:
    """Returns the rows that courses are made of; for most steps the source, which takes long to read, is known."""
    ops = run.table(Table.OPS, rank=rank)
    own = f"({' OR '.join(each.where for each in places)})"
    given = f"{own} AND {_sources(sampled, optimizer)}"
    if optimizer or len(sampled.mixed) > FEW:
        return course_rows(ops, (f"{given} AND {sampled.where}",))
    return course_rows(ops, (f"{own} AND {sampled.where_plain}", f"{given} AND {sampled.where_mixed}"))


def _nearest(steps: Sequence[int], heights: Sequence[float], each: MeasuredPlace, asked: int | None) -> int | None:
    known = sorted({*steps, *each.overflows})
    if not known:
        return None
    if asked is not None:
        return max((one for one in known if one <= asked), default=known[0])
    if each.overflows:
        return max(each.overflows)
    finite = [(height, -step) for height, step in zip(heights, steps, strict=True) if np.isfinite(height)]
    return -max(finite, default=(0.0, -known[0]))[1]


def _seen(run: Run, rank: int, place: OpPlace, where: str, step: int, *, counted: bool = False) -> LargestValue | None:
    """The op that gave the largest value in a step, of those whose exponents were counted if that is asked for."""
    ops = run.table(Table.OPS, step=step, rank=rank)
    names = ", ".join(f'"{name}"' for name in Statistics._fields)
    told = f"{where} AND step = {step}" + (" AND exp_low IS NOT NULL" if counted else "")
    rows = collect_rows(ops, f"source, seq, out, numel, {names}", where=told)
    if not rows:
        return None
    source, seq, out, numel, *values = max(rows, key=_size)
    statistics = Statistics(*values)
    if statistics.exp_counts is not None:
        statistics = statistics._replace(exp_counts=tuple(statistics.exp_counts))
    written = Operand(role=f"output {out}", dtype=place.dtype, shape="", numel=numel, statistics=statistics)
    return LargestValue(step=step, source=source, seq=seq, written=written)


def _size(row: Sequence[Any]) -> tuple[float, int]:
    """How large a row's values are, what is not finite above all; the first of equals."""
    statistics = Statistics(*row[4:])
    ends = [abs(end) for end in (statistics.min, statistics.max) if end is not None]
    return max((np.inf if np.isnan(end) else end for end in ends), default=-1.0), -row[1]
