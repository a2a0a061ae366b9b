"""The histograms of exponents that a run holds, of those executions of its steps that say how its values are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampscope.analysis.arrays import BoolArray, Columns, FloatArray, IntArray
from ampscope.analysis.exponents import Exponents
from ampscope.analysis.rounding import plain
from ampscope.analysis.tables.lazy_tables import collect_columns, collect_rows
from ampscope.analysis.tables.step_history import histories
from ampscope.trace.dtypes import FINFO, PARTS
from ampscope.trace.read.run import Run
from ampscope.trace.schema import (
    BLOCK_FALLS,
    TOP_VALUES,
    Node,
    Phase,
    ReplayStatus,
    SiteRow,
    Source,
    Table,
    execution_of,
)

#: Executions that are looked at by default: the newest, for they say what is now.
NEWEST = 24
#: Steps among which those are looked for before all are, as many times as many.
_LOOKED = 8
_IDENTITY = ("step", "source", "seq", "out", "site", "numel", "zeros", "nan", "infinite", "largest")
_COLUMNS = (
    "step, source, seq, out, site, numel, zeros, coalesce(nan, 0) AS nan, "
    "coalesce(posinf, 0) + coalesce(neginf, 0) AS infinite, "
    "coalesce(max_finite, 0) AS largest, max_finite, min_positive, exp_low, exp_counts, top_values, block_falls"
)


@dataclass(frozen=True, slots=True)
class CountedExecution:
    """One execution of a traced step."""

    step: int
    source: str  #: a `Source`
    optimizer: int
    scale: float  #: the loss scale of the step; 1 without one


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One output whose exponents were counted."""

    execution: CountedExecution
    seq: int
    out: int
    site: SiteRow
    dtype: str  #: of complex numbers, that of their parts
    numel: int
    zeros: int
    nan: int
    infinite: int
    largest: float  #: finite magnitude

    @property
    def is_gradient(self) -> bool:
        """Whether it carries the loss scale: a gradient, of a parameter or on the way there."""
        return self.site.op == Node.GRADIENT or self.site.phase == Phase.BACKWARD

    @property
    def loss_scale(self) -> float:
        """The loss scale that its values carry; 1 where they carry none."""
        return self.execution.scale if self.is_gradient else 1.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Outputs with their histograms, row by row."""

    rows: tuple[MeasuredRow, ...]
    exponents: Exponents  #: of the rows that are not all zero
    number: tuple[int | None, ...]  #: of each row, its place among these; None where it is all zero

    @property
    def has_blocks(self) -> BoolArray:
        """Whether each row's blocks were counted; a row that is all zero has nothing to count."""
        known = ~np.isnan(self.exponents.falls[:, 0])
        return np.array([number is None or bool(known[number]) for number in self.number], np.bool_)


def executions(
    run: Run, rank: int, *, sources: Sequence[Source] = (Source.LIVE, Source.REPLAY)
) -> list[CountedExecution]:
    """The executions of steps as they were, and of replays those that came out the same, the newest last.

    Args:
        run: The run.
        rank: One of its ranks.
        sources: Which executions; `Source.REPLAY_FP32` is of the same steps in float32.
    """
    unlike = {row.step for row in run.rows(Table.INCIDENTS, rank=rank) if row.replay != ReplayStatus.EXACT}
    history = histories(run, rank)
    found = []
    for each in run.traced(rank):
        execution, optimizer = execution_of(each.source)
        if execution in sources and not (execution != Source.LIVE and each.step in unlike):
            number = int(optimizer) if optimizer.isdecimal() else 0
            scale = history[number].scale_at(each.step) if number in history else 1.0
            known = scale if 0 < scale < np.inf else 1.0
            found.append(CountedExecution(each.step, each.source, number, known))
    return sorted(found, key=lambda one: (one.step, one.source))


def counted(
    run: Run, rank: int, of: Sequence[CountedExecution], newest: int, sites: Collection[int] | None = None
) -> list[CountedExecution]:
    """Returns the executions with counted exponents of any output, of at least so many of the newest such steps.

    Args:
        run: The run.
        rank: One of its ranks.
        of: The executions.
        newest: Steps; of those before them some may be there too.
        sites: Whose outputs; those of any by default.
    """
    where = "zeros IS NOT NULL"
    if sites is not None:
        where += f" AND site IN ({', '.join(map(str, sites)) or -1})"
    steps = sorted({each.step for each in of})
    keys: set[tuple[Any, ...]] = set()
    for among in (steps[-newest * _LOOKED :], steps):
        ops = run.table(Table.OPS, step=among if len(among) < len(steps) else None, rank=rank)
        keys = set(collect_rows(ops, "step, source", "step, source", where=where))
        found = [each for each in of if (each.step, each.source) in keys]
        if len({each.step for each in found}) >= newest or len(among) == len(steps):
            break
    return found


def measured_rows(run: Run, rank: int, of: Sequence[CountedExecution], *, sites: dict[int, SiteRow]) -> Measured:
    """The outputs of ``of`` that have a histogram, at the given sites, in the order of the executions.

    Raises:
        RunDamaged: a Parquet part turned out to be broken while it was read.
    """
    by_key = {(each.step, each.source): each for each in of}
    told = "(exp_counts IS NOT NULL OR zeros = numel)"  # of one that is all NaN nothing is known
    where = f"zeros IS NOT NULL AND {told}"
    ops = run.table(Table.OPS, step={each.step for each in of}, rank=rank)
    columns = collect_columns(ops, _COLUMNS, where=where)
    kept: list[tuple[int, MeasuredRow]] = []
    identities = zip(*(columns.arrays[name].tolist() for name in _IDENTITY), strict=True)
    for place, (step, source, seq, out, site, *counts) in enumerate(identities):
        execution, known = by_key.get((step, source)), sites.get(site)
        dtype = _dtype(known, out) if known is not None else ""
        if execution is not None and known is not None and dtype in FINFO:
            kept.append((place, MeasuredRow(execution, seq, out, known, dtype, *counts)))
    kept.sort(key=lambda one: (one[1].execution.step, one[1].execution.source, one[1].seq, one[1].out))
    return _measured(columns, kept)


def _dtype(site: SiteRow, out: int) -> str:
    given = plain(site.out_dtypes[out]) if out < len(site.out_dtypes) else ""
    return PARTS.get(given, given)


def _measured(columns: Columns, kept: Sequence[tuple[int, MeasuredRow]]) -> Measured:
    low, high = columns.floats("min_positive"), columns.floats("max_finite")
    begins, lists = columns.floats("exp_low"), columns.arrays["exp_counts"]
    known = (low > 0) & (high > 0) & ~np.isnan(begins)
    counted = [n for n, (place, _) in enumerate(kept) if known[place]]
    places = np.array([kept[n][0] for n in counted], np.int64)
    counts = [np.asarray(lists[place]) for place in places]
    lengths = np.array([len(each) for each in counts], np.int64)
    numbers: list[int | None] = [None] * len(kept)
    for number, n in enumerate(counted):
        numbers[n] = number
    dtypes = [FINFO[kept[n][1].dtype] for n in counted]
    exponents = Exponents(
        row=np.repeat(np.arange(len(counted)), lengths),
        exponent=_ascending(begins[places].astype(np.int64), lengths),
        count=np.concatenate([np.empty(0), *counts]).astype(np.float64),
        low=low[places],
        high=high[places],
        mantissa=np.array([each.mantissa_bits for each in dtypes], np.int64),
        lowest=np.array([each.lowest for each in dtypes], np.int64),
        top=_table(columns, "top_values", places, TOP_VALUES, rest=np.nan),
        falls=_table(columns, "block_falls", places, BLOCK_FALLS, rest=0.0),
    )
    return Measured(tuple(row for _, row in kept), exponents, tuple(numbers))


def _table(columns: Columns, name: str, places: IntArray, width: int, *, rest: float) -> FloatArray:
    """Returns the list in a column as a row for each place, filled up with ``rest``; NaN where there is none."""
    found = np.full((places.size, width), np.nan)
    lists, known = columns.arrays[name], columns.known(name)
    for row, place in zip(found, places.tolist(), strict=True):
        if known[place]:
            given = np.ma.filled(lists[place][:width].astype(np.float64), 0.0)
            row[:] = rest
            row[: given.size] = given
    return found


def _ascending(begins: IntArray, lengths: IntArray) -> IntArray:
    """For each row, as many whole numbers as it is long, from where it begins."""
    offsets = np.cumsum(lengths) - lengths
    found: IntArray = np.arange(int(lengths.sum())) + np.repeat(begins - offsets, lengths)
    return found
