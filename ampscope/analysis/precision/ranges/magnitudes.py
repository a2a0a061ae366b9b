"""The query engine sums up how large values got at each place: over all sampled steps, step by step, or by stretch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ampscope.analysis.arrays import BoolArray, Columns, FloatArray, IntArray, joined
from ampscope.analysis.precision.ranges.places import OpPlace, SampledExecutions, SampledStretch, numbered, place_of
from ampscope.analysis.tables.lazy_tables import Lazy, collect_columns
from ampscope.forecast import Point
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Source, Table, source_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """A row for each place, by its number, and a column for each stretch."""

    stretches: tuple[SampledStretch, ...] = ()
    #: Logarithm of the largest finite magnitude; NaN where none was measured, or all was zero.
    heights: FloatArray = field(default_factory=lambda: np.empty((0, 0)))
    #: Subnormal ones among the elements that are not zero; NaN where that was not measured.
    subnormal: FloatArray = field(default_factory=lambda: np.empty((0, 0)))

    def largest_in(self, number: int) -> SampledStretch | None:
        """The stretch in which a place's values were largest; None where nothing is known."""
        own = self.heights[number] if number < len(self.heights) else np.empty(0)
        return self.stretches[int(np.nanargmax(own))] if np.isfinite(own).any() else None


def make_cells(
    numbers: IntArray,
    steps: IntArray,
    sizes: FloatArray,
    lost: tuple[FloatArray, FloatArray],
    *,
    places: int,
    stretches: Sequence[SampledStretch],
) -> Cells:
    """The cells of sums by place and stretch.

    Args:
        numbers: Of each sum the number of its place; negative ones are left out.
        steps: A step of its stretch, or one after it and before the next.
        sizes: The largest magnitude.
        lost: How many elements are subnormal, and how many are not zero, where that was measured.
        places: How many there are.
        stretches: All of them.
    """
    kept = numbers >= 0
    begins = np.array([each.first for each in stretches], np.int64)
    cell = numbers[kept], np.maximum(np.searchsorted(begins, steps[kept], side="right") - 1, 0)
    shape = places, len(begins)
    largest = np.full(shape, np.nan)
    np.fmax.at(largest, cell, sizes[kept])
    subnormal, nonzero = (_added(shape, cell, values[kept]) for values in lost)
    with np.errstate(divide="ignore", invalid="ignore"):
        return Cells(
            stretches=tuple(stretches),
            heights=np.where(largest > 0, np.log2(largest), np.nan),
            subnormal=np.where(nonzero > 0, subnormal / nonzero, np.nan),
        )


def _added(shape: tuple[int, int], cell: tuple[IntArray, IntArray], values: FloatArray) -> FloatArray:
    found = np.zeros(shape)
    np.add.at(found, cell, np.nan_to_num(values))
    return found


#: Of the finite ends of the recorded ranges, in the query engine's words, how often that was and how often it was not
#: finite.
_FINITE = (
    """max("max") FILTER (isfinite("max")) AS high, min("min") FILTER (isfinite("min") AND "max" < 'inf') AS low"""
)
_ENDS = f'{_FINITE}, count(*) AS executions, count(*) FILTER (NOT (isfinite("min") AND isfinite("max"))) AS bad'
#: What full statistics say, where they were taken, also of what was finite beside an infinity; what else is left of an
#: overflow says nothing.
_LOST = (
    "max(max_finite) FILTER (isfinite(max_finite)) AS beside, sum(zeros) AS zeros, sum(subnormals) AS subnormals, "
    "sum(numel) FILTER (subnormals IS NOT NULL) AS measured, sum(flushed) AS flushed, "
    "sum(numel) FILTER (flushed IS NOT NULL) AS judged"
)
_NO_ENDS = "NULL::FLOAT AS high, NULL::FLOAT AS low, 0 AS executions, 0 AS bad"
_NOT_LOST = (
    "NULL::FLOAT AS beside, NULL::BIGINT AS zeros, NULL::BIGINT AS subnormals, NULL::BIGINT AS measured, "
    "NULL::BIGINT AS flushed, NULL::BIGINT AS judged"
)
#: More than can be counted: only a damaged trace says so.
_MOST_COUNTED = 2.0**62
_KEY = "site, out, source"
#: More steps than this of which more was recorded than usual are not asked for apart.
FEW = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Magnitudes:
    """Holds the magnitudes that were measured at one place."""

    place: OpPlace
    number: int  #: its row in the cells
    largest: float | None  #: largest finite magnitude of all sampled steps; None where nothing finite was measured
    course: tuple[Point, ...]  #: the logarithm of the largest magnitude by step, where that is not zero
    zero_steps: int  #: steps of the course in which all was zero
    steps: int  #: sampled steps in which it ran
    measured: int  #: elements of which it is known how many are zero or subnormal
    zeros: int
    subnormals: int
    judged: int  #: elements of which it is known how many are zero though float32 would have kept them
    flushed: int
    bad: int  #: results that were not finite

    @property
    def latest(self) -> Point | None:
        """The newest point of its course."""
        return self.course[-1] if self.course else None


def magnitudes(
    run: Run, rank: int, sampled: SampledExecutions, *, whole: bool = True
) -> tuple[list[Magnitudes], Cells]:
    """Returns the magnitudes at each place of one rank, and cells that sum up all sampled steps by stretches of them.

    Args:
        run: The run.
        rank: The rank.
        sampled: Its sampled steps.
        whole: Sum up all of them, not only those that the courses are drawn through.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    course = _summed(run.table(Table.OPS, step=sampled.course, rank=rank), "step", sampled.where)
    sums = _by_stretch(run.table(Table.OPS, rank=rank), sampled) if whole and sampled.bits else course
    if not len(sums):
        return [], Cells()
    different, of_sums = _keys(sums)
    sites = {site.site: site for site in run.rows(Table.SITES, rank=rank)}
    places, numbers = numbered(
        place_of(sites[site], out, sampled.optimizers[source]) if site in sites else None
        for site, out, source in different
    )
    of_rows = np.array(numbers)[of_sums]
    summed = _Sums(of_rows, sums, len(places), sampled.count)
    by_key = dict(zip(different, numbers, strict=True))
    in_course, of_course = _keys(course)
    drawn = _Courses(np.array([by_key.get(key, -1) for key in in_course], np.int64)[of_course], course, len(places))
    found = [summed.of(number, place, drawn) for number, place in enumerate(places)]
    return found, _cells(of_rows, sums, len(places), sampled) if whole else Cells()


class MagnitudeCourse(NamedTuple):
    """How large values became step by step."""

    steps: IntArray  #: ascending
    heights: FloatArray  #: the logarithm of the largest finite magnitude; -inf where all was zero
    counted: tuple[int, ...]  #: steps in which exponents were counted


def course_rows(ops: Lazy, where: Sequence[str]) -> Columns:
    """The rows that are asked for, by site, output and step: all that a `MagnitudeCourse` is made of, in one look.

    Args:
        ops: The ops of a rank.
        where: Which of them, in the query engine's words; each condition is a query of its own.
    """
    beside = "max(max_finite) FILTER (zeros IS NOT NULL AND isfinite(max_finite)) AS beside"
    told = f"site, out, step, {_FINITE}, {beside}, count(exp_low) AS counted"
    return joined([collect_columns(ops, told, "site, out, step", where=each) for each in where])


def course_of(rows: Columns) -> MagnitudeCourse:
    """Returns the course of largest magnitudes that rows of `course_rows` make."""
    steps, of_rows = np.unique(rows.ints("step"), return_inverse=True)
    sizes = np.full(len(steps), np.nan)
    ends = np.fmax(np.abs(rows.floats("low")), np.abs(rows.floats("high")))
    np.fmax.at(sizes, of_rows, np.fmax(ends, rows.floats("beside")))
    counted = np.unique(rows.ints("step")[rows.ints("counted") > 0]).tolist()
    with np.errstate(divide="ignore"):
        return MagnitudeCourse(steps, np.log2(sizes), tuple(counted))


def _by_stretch(ops: Lazy, sampled: SampledExecutions) -> Columns:
    """Sums by site, output, source and stretch; a key may have several rows, which say different things.

    Of tens of millions of rows, grouping by a text takes a third of the time, and so do statistics that few rows have.
    """
    if len(sampled.mixed) > FEW:
        return _at_last_steps(_summed(ops, sampled.stretch, sampled.where), sampled)
    where, by = sampled.where_plain, f"site, out, {sampled.stretch}"
    key = f"site, out, '{source_of(Source.LIVE, 0)}' AS source, {sampled.stretch} AS step"
    pieces = (
        collect_columns(ops, f"{key}, {_ENDS}, {_NOT_LOST}", by, where=where),
        collect_columns(ops, f"{key}, {_NO_ENDS}, {_LOST}", by, where=f"{where} AND zeros IS NOT NULL"),
        _summed(ops, sampled.stretch, sampled.where_mixed),
    )
    return _at_last_steps(joined(pieces), sampled)


def _at_last_steps(sums: Columns, sampled: SampledExecutions) -> Columns:
    """Sums by stretch with a step in the place of the stretch's number."""
    return Columns({**sums.arrays, "step": sampled.last_of(sums.ints("step"))})


def _summed(ops: Lazy, step: str, where: str) -> Columns:
    """Sums by site, output, source and what is made of the step."""
    return collect_columns(ops, f"{_KEY}, {step} AS step, {_ENDS}, {_LOST}", f"{_KEY}, {step}", where=where)


def _cells(numbers: IntArray, sums: Columns, places: int, sampled: SampledExecutions) -> Cells:
    lost = sums.floats("subnormals"), sums.floats("measured") - sums.floats("zeros")
    steps, sizes = sums.ints("step"), _magnitude(sums)
    return make_cells(numbers, steps, sizes, lost, places=places, stretches=sampled.stretches)


def _keys(rows: Columns) -> tuple[list[tuple[int, int, str]], IntArray]:
    """The different sites, outputs and sources of rows, and which of them each row has."""
    named = rows.arrays["source"].tolist()
    sources = list(dict.fromkeys(named))
    numbers = {source: number for number, source in enumerate(sources)}
    site, out, source = rows.ints("site"), rows.ints("out"), np.array([numbers[each] for each in named], np.int64)
    most = int(out.max(initial=0)) + 1
    different, of_row = np.unique((site * most + out) * len(sources) + source, return_inverse=True)
    outputs = (divmod(key, len(sources)) for key in different.tolist())
    return [(*divmod(key, most), sources[number]) for key, number in outputs], of_row


def _magnitude(rows: Columns) -> FloatArray:
    """Returns the larger end of each row as a magnitude; NaN where none was measured."""
    low, high = np.abs(rows.floats("low")), np.abs(rows.floats("high"))
    ends, beside = np.fmax(low, high), rows.floats("beside")
    found: FloatArray = np.where(np.isnan(ends), beside, np.fmax(ends, np.where(rows.ints("bad") > 0, beside, ends)))
    return found


class _Sums:
    """The sums over all sampled steps, of which there are so many at most, by number of the place."""

    def __init__(self, numbers: IntArray, rows: Columns, count: int, most: int) -> None:
        self._most = most
        self._kept = numbers >= 0
        self._numbers, self._count = numbers[self._kept], count
        self._largest = np.full(count, np.nan)
        np.fmax.at(self._largest, self._numbers, _magnitude(rows)[self._kept])
        names = ("zeros", "subnormals", "measured", "judged", "flushed", "executions", "bad")
        self._sums = {name: self._summed(np.nan_to_num(rows.floats(name))) for name in names}

    def _summed(self, values: FloatArray) -> list[int]:
        sums = np.bincount(self._numbers, weights=values[self._kept], minlength=self._count)
        told: list[int] = np.clip(sums, -_MOST_COUNTED, _MOST_COUNTED).astype(np.int64).tolist()
        return told

    def of(self, number: int, place: OpPlace, courses: _Courses) -> Magnitudes:
        """Returns the magnitudes that were measured at one place."""
        sums = {name: values[number] for name, values in self._sums.items()}
        executions = sums.pop("executions")
        course, zero_steps, drawn, seen = courses.of(number)
        largest = float(self._largest[number])
        return Magnitudes(
            place=place,
            number=number,
            largest=None if np.isnan(largest) else largest,
            course=course,
            zero_steps=zero_steps,
            steps=max(1, min(round(executions * seen / drawn), self._most)) if drawn else 1,
            **sums,
        )


class _Courses:
    """The largest magnitudes by step, sorted by place."""

    def __init__(self, numbers: IntArray, rows: Columns, places: int) -> None:
        steps, sizes, executions = rows.ints("step"), _magnitude(rows), rows.ints("executions")
        order = np.lexsort((steps, numbers))
        numbers, steps, sizes, executions = numbers[order], steps[order], sizes[order], executions[order]
        first: BoolArray = np.ones(len(numbers), np.bool_)  # of a place in a step
        first[1:] = (np.diff(numbers) != 0) | (np.diff(steps) != 0)
        begins = np.flatnonzero(first)
        self._sizes = np.fmax.reduceat(sizes, begins) if len(begins) else sizes
        self._points = _points(steps[begins], self._sizes)
        self._shown = np.append(0, np.cumsum(self._sizes > 0)).tolist()  # points before each row
        self._zeros = np.append(0, np.cumsum(self._sizes == 0)).tolist()
        self._executions = np.append(0, np.cumsum(executions))[np.append(begins, len(numbers))].tolist()
        self._first = np.searchsorted(numbers[begins], np.arange(places + 1)).tolist()

    def of(self, number: int) -> tuple[tuple[Point, ...], int, int, int]:
        """Returns a place's course, its steps in which all was zero, and how often it ran in how many steps."""
        begin, end = self._first[number], self._first[number + 1]
        course = tuple(self._points[self._shown[begin] : self._shown[end]])
        zeros, executions = (each[end] - each[begin] for each in (self._zeros, self._executions))
        return course, zeros, executions, end - begin


def _points(steps: IntArray, sizes: FloatArray) -> list[Point]:
    """The logarithms of the sizes that are above zero, with their steps."""
    shown = np.flatnonzero(sizes > 0)
    return list(zip(steps[shown].tolist(), np.log2(sizes[shown]).tolist(), strict=True))
