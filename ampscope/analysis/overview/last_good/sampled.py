"""How large values were at each point of the program: in good steps that were recorded op by op, and in the bad one."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ampscope.analysis.numerics.arrays import Columns, FloatArray, IntArray
from ampscope.analysis.overview.last_good.good_steps import GoodSteps
from ampscope.analysis.tables.lazy_tables import group_columns, rank_table
from ampscope.analysis.tables.traced_steps import traced_rows
from ampscope.trace.files.traced_index import StepRows
from ampscope.trace.read.run import Run
from ampscope.trace.schema import SINK_NODES, Node, Phase, ReplayStatus, SiteRow, Source, Table, source_of

#: Recorded good steps that are compared with, the newest, and rows of ops that they have at most.
MOST_STEPS, MOST_ROWS = 8, 150_000
#: Recorded steps among which they are looked for.
_LOOKED = 64
_MEASURED = (
    'max(greatest(abs("min"), abs("max"))) FILTER (isfinite("min") AND isfinite("max")) AS high, '
    'count(*) FILTER (NOT (isfinite("min") AND isfinite("max"))) AS bad, '
    'count(*) FILTER (isnan("min") OR isnan("max")) AS nan, '
    "sum(zeros) AS zeros, sum(numel) FILTER (zeros IS NOT NULL) AS counted, min(seq) AS first"
)
_KEY = "site, out, step"
#: What a step leaves behind says nothing of what was given to it; of gradients it does.
_LEFT = SINK_NODES - {Node.GRADIENT}


class Point(NamedTuple):
    """A point of the program, whatever dtypes and shapes it has."""

    op: str
    name: str
    module: str
    phase: str
    file: str
    line: int
    out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What was measured at each point; a column for each recorded good step, the newest last, and one for the bad."""

    steps: IntArray  #: the good ones
    points: list[Point]
    first: IntArray  #: when a point first ran in the bad step
    high: FloatArray  #: largest magnitudes; NaN where nothing finite was measured
    zeros: FloatArray  #: shares of zeros; NaN where they were not counted
    bad: npt.NDArray[np.bool_]  #: which had something that is not finite
    nan: npt.NDArray[np.bool_]  #: which had a NaN
    #: by point and column: the sites that ran
    sites: dict[tuple[int, int], list[SiteRow]] = field(default_factory=dict)

    def said(self, point: int, column: int, of: str) -> frozenset[str]:
        """The dtypes or shapes that a point's output had in a step.

        Args:
            point: Its number.
            column: The step's.
            of: ``out_dtypes`` or ``out_shapes``.
        """
        out = self.points[point].out
        given: Iterable[Sequence[str]] = (getattr(site, of) for site in self.sites.get((point, column), ()))
        return frozenset(each[out] for each in given if 0 <= out < len(each))

    @property
    def broken(self) -> npt.NDArray[np.bool_]:
        """Which points have something that is not finite in the bad step, and had nothing such in any good one."""
        known = np.isfinite(self.high[:, -2])
        return known & self.bad[:, -1] & ~self.bad[:, :-1].any(axis=1)


def sampled(run: Run, rank: int, optimizer: int, good: GoodSteps) -> Sampled | None:
    """What can be compared; None where no good step, or not the bad one, was recorded op by op.

    Args:
        run: The run.
        rank: One of its ranks.
        optimizer: One of its optimizers.
        good: The steps before the bad one.
    """
    traced = traced_rows(run, rank)
    now = _of_bad(run, rank, optimizer, good.until, {each.source for each in traced if each.step == good.until})
    live = source_of(Source.LIVE, optimizer)
    steps = _newest((each for each in traced if each.source == live), good)
    if now is None or not steps:
        return None
    listed = ", ".join(map(str, steps))
    where = f"out >= 0 AND ((source = '{live}' AND step IN ({listed})) OR (source = '{now}' AND step = {good.until}))"
    ops = rank_table(run, Table.OPS, rank, step=(*steps, good.until))
    found = group_columns(ops, f"{_KEY}, {_MEASURED}", _KEY, where=where)
    sites = {site.site: site for site in run.rows(Table.SITES, rank=rank)}
    return _arranged(found, [*steps, good.until], sites)


def _of_bad(run: Run, rank: int, optimizer: int, step: int, executed: Collection[str]) -> str | None:
    """The execution of the bad step that tells most of it: the replay, if it came out the same, or the step itself."""
    replays = [row.replay for row in run.rows(Table.INCIDENTS, rank=rank, step=step) if row.optimizer == optimizer]
    faithful = all(each == ReplayStatus.EXACT for each in replays)  # a spike has no row there
    sources = (Source.REPLAY, Source.LIVE) if faithful else (Source.LIVE,)
    return next((name for each in sources if (name := source_of(each, optimizer)) in executed), None)


def _newest(traced: Iterable[StepRows], good: GoodSteps) -> list[int]:
    """The newest good ones of some steps, as many as there are rows to be read, in order."""
    kept: list[int] = []
    total = 0
    newest = heapq.nlargest(_LOOKED, ((each.step, each.rows) for each in traced if each.step <= good.calm))
    for step, count in newest:
        if good.is_good(step):
            total += count
            if kept and (total > MOST_ROWS or len(kept) == MOST_STEPS):
                break
            kept.append(step)
    return kept[::-1]


def _arranged(rows: Columns, steps: list[int], sites: dict[int, SiteRow]) -> Sampled:
    """The rows of a query as one line for each point."""
    numbers: dict[Point, int] = {}
    by_site: dict[tuple[int, int], int] = {}
    columns = np.searchsorted(steps, rows.ints("step"))
    of_row = np.full(len(rows), -1)
    ran: dict[tuple[int, int], list[SiteRow]] = {}
    for place, (number, out) in enumerate(zip(rows.ints("site").tolist(), rows.ints("out").tolist(), strict=True)):
        site = sites.get(number)
        if site is None or site.op in _LEFT or site.phase == Phase.OPTIMIZER:
            continue
        if (number, out) not in by_site:
            point = Point(site.op, site.name, site.module, site.phase, site.file, site.line, out)
            by_site[number, out] = numbers.setdefault(point, len(numbers))
        of_row[place] = by_site[number, out]
        ran.setdefault((int(of_row[place]), int(columns[place])), []).append(site)
    kept = of_row >= 0
    at = of_row[kept], columns[kept]
    shape = len(numbers), len(steps)
    high, zeros, counted, bad, nan = (np.full(shape, np.nan), *(np.zeros(shape) for _ in range(4)))
    np.fmax.at(high, at, rows.floats("high")[kept])
    for name, into in (("zeros", zeros), ("counted", counted), ("bad", bad), ("nan", nan)):
        np.add.at(into, at, np.nan_to_num(rows.floats(name)[kept]))
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    is_bad_step = kept & (columns == len(steps) - 1)
    np.minimum.at(first, of_row[is_bad_step], rows.ints("first")[is_bad_step])
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(counted > 0, zeros / counted, np.nan)
    return Sampled(
        steps=np.array(steps[:-1], np.int64),
        points=list(numbers),
        first=first,
        high=high,
        zeros=shares,
        bad=bad > 0,
        nan=nan > 0,
        sites=ran,
    )
