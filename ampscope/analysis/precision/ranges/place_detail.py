"""One place close up: its magnitudes step by step, where they are going, and how its values lay in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampscope.analysis.numerics.arrays import FloatArray, IntArray
from ampscope.analysis.numerics.curve import Curve, make_curve
from ampscope.analysis.precision.ranges.magnitudes import FEW, course_of_rows
from ampscope.analysis.precision.ranges.measured import MeasuredPlace, MeasuredRun
from ampscope.analysis.precision.ranges.places import Place, place_of
from ampscope.analysis.precision.ranges.ranges import RangeRow, range_row
from ampscope.analysis.precision.ranges.sampled_steps import Sampled, sampled_steps
from ampscope.analysis.results import Operand
from ampscope.analysis.tables.lazy_tables import Lazy, collect_expressions, collect_groups, rank_table
from ampscope.forecast.forecast import Forecast
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Statistics, Table

#: Points of a course that are kept.
_POINTS = 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a place gave in one step, at the op that gave the largest value."""

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
    seen: Seen | None  #: the step that was asked for; None where nothing of it is left
    counted: Seen | None  #: that step, or the nearest one, with its histogram; None where none was counted


def place_detail(run: Run, found: MeasuredRun, key: str, *, step: int | None = None) -> PlaceDetail | None:
    """A place close up.

    Args:
        run: The run.
        found: What was measured of it.
        key: The place's `Place.key`.
        step: The step to look at, or the sampled one before it; by default that of its largest value.

    Returns:
        None where there is no such place.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    each = next((each for each in found.places if each.place.key == key), None)
    if each is None:
        return None
    sampled = sampled_steps(run, found.rank)
    own = _rows_of(run, found.rank, each.place)
    where = f"{own} AND {_sources(sampled, each.place)} AND {sampled.where}"
    ops = rank_table(run, Table.OPS, found.rank)
    steps, heights = _course(ops, sampled, each.place, own)
    at = _nearest(steps.tolist(), heights.tolist(), each, step)
    counted = [row[0] for row in collect_groups(ops, "step", "step", where=f"exp_low IS NOT NULL AND {where}")]
    with_counts = min(counted, key=lambda one: (abs(one - at), one)) if counted and at is not None else None
    return PlaceDetail(
        row=range_row(each, found.cells),
        course=make_curve(steps, heights, points=_POINTS),
        limit=float(np.log2(each.place.format.max)),
        normal=float(each.place.format.normal),
        forecast=each.forecast,
        overflows=tuple(dict.fromkeys(sorted(each.overflows))),
        seen=None if at is None else _seen(run, found.rank, each.place, where, at),
        counted=None if with_counts is None else _seen(run, found.rank, each.place, where, with_counts, counted=True),
    )


def _rows_of(run: Run, rank: int, place: Place) -> str:
    """The rows of a place, whatever they are from, in the query engine's words."""
    own: dict[int, list[int]] = {}
    for site in run.rows(Table.SITES, rank=rank):
        if site.op == place.op and site.module == place.module:
            for out in range(len(site.out_dtypes)):
                if place_of(site, out, place.optimizer) == place:
                    own.setdefault(out, []).append(site.site)
    told = [f"site IN ({', '.join(map(str, sites))}) AND out = {out}" for out, sites in own.items()]
    return f"({' OR '.join(told) or 'false'})"


def _sources(sampled: Sampled, place: Place) -> str:
    own = ", ".join(f"'{source}'" for source, number in sampled.optimizers.items() if number == place.optimizer)
    return f"source IN ({own or repr('')})"


def _course(ops: Lazy, sampled: Sampled, place: Place, own: str) -> tuple[IntArray, FloatArray]:
    """The logarithm of its largest magnitude by step; of most steps the source, which takes long to read, is known."""
    given = f"{own} AND {_sources(sampled, place)}"
    if place.optimizer or len(sampled.mixed) > FEW:
        return course_of_rows(ops, (f"{given} AND {sampled.where}",))
    return course_of_rows(ops, (f"{own} AND {sampled.where_plain}", f"{given} AND {sampled.where_mixed}"))


def _nearest(steps: Sequence[int], heights: Sequence[float], each: MeasuredPlace, asked: int | None) -> int | None:
    """The step to look at."""
    known = sorted({*steps, *each.overflows})
    if not known:
        return None
    if asked is not None:
        return max((one for one in known if one <= asked), default=known[0])
    if each.overflows:
        return max(each.overflows)
    finite = [(height, -step) for height, step in zip(heights, steps, strict=True) if np.isfinite(height)]
    return -max(finite, default=(0.0, -known[0]))[1]


def _seen(run: Run, rank: int, place: Place, where: str, step: int, *, counted: bool = False) -> Seen | None:
    """The op that gave the largest value in a step, of those whose exponents were counted if that is asked for."""
    ops = rank_table(run, Table.OPS, rank, step=step)
    names = ", ".join(f'"{name}"' for name in Statistics._fields)
    told = f"{where} AND step = {step}" + (" AND exp_low IS NOT NULL" if counted else "")
    rows = collect_expressions(ops, f"source, seq, out, numel, {names}", where=told)
    if not rows:
        return None
    source, seq, out, numel, *values = max(rows, key=_size)
    statistics = Statistics(*values)
    if statistics.exp_counts is not None:
        statistics = statistics._replace(exp_counts=tuple(statistics.exp_counts))
    written = Operand(role=f"output {out}", dtype=place.dtype, shape="", numel=numel, statistics=statistics)
    return Seen(step=step, source=source, seq=seq, written=written)


def _size(row: Sequence[Any]) -> tuple[float, int]:
    """How large a row's values are, what is not finite above all; the first of equals."""
    statistics = Statistics(*row[4:])
    ends = [abs(end) for end in (statistics.min, statistics.max) if end is not None]
    return max((np.inf if np.isnan(end) else end for end in ends), default=-1.0), -row[1]
