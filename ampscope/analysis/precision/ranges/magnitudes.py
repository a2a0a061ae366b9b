"""How large values got at each place: summed up by the query engine over all sampled steps, and step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ampscope.analysis.numerics.arrays import BoolArray, Columns, FloatArray, IntArray
from ampscope.analysis.precision.ranges.places import Place, numbered, place_of
from ampscope.analysis.precision.ranges.sampled_steps import Sampled
from ampscope.analysis.tables.lazy_tables import group_columns, rank_table
from ampscope.forecast.forecast import Point
from ampscope.trace.read.run import Run
from ampscope.trace.schema import Table

#: Of the finite ends of the recorded ranges, in the query engine's words, and of what was finite beside an infinity,
#: where every statistic was taken; what else is left of an overflow says nothing.
_ENDS = (
    """max("max") FILTER (isfinite("max")) AS high, min("min") FILTER (isfinite("min") AND "max" < 'inf') AS low, """
    "max(max_finite) FILTER (isfinite(max_finite)) AS beside"
)
#: What full statistics say, where they were taken.
_LOST = (
    "sum(zeros) AS zeros, sum(subnormals) AS subnormals, sum(numel) FILTER (subnormals IS NOT NULL) AS measured, "
    'count(*) AS executions, count(*) FILTER (NOT (isfinite("min") AND isfinite("max"))) AS bad'
)
_KEY = "site, out, source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Magnitudes:
    """What was measured at one place."""

    place: Place
    largest: float | None  #: largest finite magnitude of all sampled steps; None where nothing finite was measured
    course: tuple[Point, ...]  #: the logarithm of the largest magnitude by step, where that is not zero
    zero_steps: int  #: steps of the course in which all was zero
    steps: int  #: sampled steps in which it ran
    measured: int  #: elements of which it is known how many are zero or subnormal
    zeros: int
    subnormals: int
    bad: int  #: results that were not finite

    @property
    def latest(self) -> Point | None:
        """The newest point of its course."""
        return self.course[-1] if self.course else None


def magnitudes(run: Run, rank: int, sampled: Sampled, *, whole: bool = True) -> list[Magnitudes]:
    """What was measured at each place of one rank.

    Args:
        run: The run.
        rank: The rank.
        sampled: Its sampled steps.
        whole: Sum up all of them, not only those that the courses are drawn through.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    ops = rank_table(run, Table.OPS, rank)
    by_step = f"{_KEY}, step"
    course = group_columns(ops, f"{by_step}, {_ENDS}, {_LOST}", by_step, where=sampled.where_course)
    sums = group_columns(ops, f"{_KEY}, {_ENDS}, {_LOST}", _KEY, where=sampled.where) if whole else course
    if not len(sums):
        return []
    different, of_sums = _keys(sums)
    sites = {site.site: site for site in run.rows(Table.SITES, rank=rank)}
    places, numbers = numbered(
        place_of(sites[site], out, sampled.optimizers[source]) if site in sites else None
        for site, out, source in different
    )
    summed = _Sums(np.array(numbers)[of_sums], sums, len(places), sampled.count)
    by_key = dict(zip(different, numbers, strict=True))
    in_course, of_course = _keys(course)
    drawn = _Courses(np.array([by_key.get(key, -1) for key in in_course], np.int64)[of_course], course)
    return [summed.of(number, place, drawn) for number, place in enumerate(places)]


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
    """Of each row, the larger of its ends; NaN where none was measured."""
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
        names = ("zeros", "subnormals", "measured", "executions", "bad")
        self._sums = {name: self._summed(np.nan_to_num(rows.floats(name))) for name in names}

    def _summed(self, values: FloatArray) -> IntArray:
        return np.bincount(self._numbers, weights=values[self._kept], minlength=self._count).astype(np.int64)

    def of(self, number: int, place: Place, courses: _Courses) -> Magnitudes:
        """What was measured at one place."""
        sums = {name: int(values[number]) for name, values in self._sums.items()}
        executions = sums.pop("executions")
        course, zero_steps, drawn, seen = courses.of(number)
        largest = float(self._largest[number])
        return Magnitudes(
            place=place,
            largest=None if np.isnan(largest) else largest,
            course=course,
            zero_steps=zero_steps,
            steps=max(1, min(round(executions * seen / drawn), self._most)) if drawn else 1,
            **sums,
        )


class _Courses:
    """The largest magnitudes by step, sorted by place."""

    def __init__(self, numbers: IntArray, rows: Columns) -> None:
        steps, sizes, executions = rows.ints("step"), _magnitude(rows), rows.ints("executions")
        order = np.lexsort((steps, numbers))
        numbers, steps, sizes, executions = numbers[order], steps[order], sizes[order], executions[order]
        first: BoolArray = np.ones(len(numbers), np.bool_)  # of a place in a step
        first[1:] = (np.diff(numbers) != 0) | (np.diff(steps) != 0)
        begins = np.flatnonzero(first)
        self._numbers, self._steps = numbers[begins], steps[begins]
        self._sizes = np.fmax.reduceat(sizes, begins) if len(begins) else sizes
        self._executions = np.add.reduceat(executions, begins) if len(begins) else executions

    def of(self, number: int) -> tuple[tuple[Point, ...], int, int, int]:
        """Of one place: its course, steps in which all was zero, and how often it ran in how many steps."""
        begin, end = np.searchsorted(self._numbers, [number, number + 1])
        sizes = self._sizes[begin:end]
        shown = np.flatnonzero(sizes > 0)
        logs = np.log2(sizes[shown]).tolist()
        course = tuple(zip(self._steps[begin:end][shown].tolist(), logs, strict=True))
        return course, int((sizes == 0).sum()), int(self._executions[begin:end].sum()), int(end - begin)
