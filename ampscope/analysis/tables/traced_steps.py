"""The ops of one traced step are counted by site, where the query engine sums up, as far as the run recorded them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import narwhals as nw

from ampscope.analysis.results import SourceLine
from ampscope.analysis.rounding import itemsize
from ampscope.analysis.tables.lazy_tables import Lazy, collect, first_rank, rank_table
from ampscope.trace.files.parquet_part import StepRows
from ampscope.trace.read.run import Run
from ampscope.trace.read.table_folders import Stamp
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, SiteRow, Source, Table

_NODES = frozenset(str(node) for node in ENTRY_NODES | SINK_NODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One execution of a step whose ops were recorded."""

    rank: int
    step: int
    source: str  #: `Source`, or ``replay:NAME``
    rows: int  #: recorded outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """A site and what ran there in one traced step."""

    site: SiteRow
    count: int  #: executions
    elements: int  #: of the first output, over all executions
    bytes: int  #: of all outputs
    first: int  #: sequence number of the first execution

    @property
    def line(self) -> SourceLine | None:
        """The user's line, where one is known."""
        site = self.site
        if not site.file:
            return None
        return SourceLine(file=site.file, line=site.line, function=site.function, code=site.code)


def traced_rows(run: Run, rank: int) -> Sequence[StepRows]:
    """How many rows there are of each execution that a rank has traced, in no order; asked once for every state."""
    stamp = run.stamp(Table.OPS, rank=rank)
    known = _counts.setdefault(run, {})
    if rank not in known or known[rank][0] != stamp:
        known[rank] = stamp, tuple(run.traced(rank))
    return known[rank][1]


#: By run and rank.
_counts: WeakKeyDictionary[Run, dict[int, tuple[Stamp, Sequence[StepRows]]]] = WeakKeyDictionary()


def traced_steps(run: Run, *, rank: int | None = None) -> tuple[TracedStep, ...]:
    """Returns the traced executions, the newest step first; of one step the live trace first, then replays by name."""
    rank = first_rank(run) if rank is None else rank
    stamp = run.stamp(Table.OPS, rank=rank)
    known = _known.setdefault(run, {})
    if rank not in known or known[rank][0] != stamp:
        found = (
            TracedStep(rank=rank, step=step, source=source, rows=rows) for step, source, rows in traced_rows(run, rank)
        )
        known[rank] = stamp, _in_order(found)
    return known[rank][1]


def first_traced_steps(run: Run, *, rank: int, count: int) -> tuple[TracedStep, ...]:
    """The first ``count`` of what was traced, the oldest first, without putting all that was in order."""
    counted = traced_rows(run, rank)
    last = max(heapq.nsmallest(count, {each.step for each in counted}), default=-1)
    early = (
        TracedStep(rank=rank, step=step, source=source, rows=rows) for step, source, rows in counted if step <= last
    )
    return _in_order(early)[::-1][:count]


#: By run and rank: the files are asked once for every state of the table.
_known: WeakKeyDictionary[Run, dict[int, tuple[Stamp, tuple[TracedStep, ...]]]] = WeakKeyDictionary()


def _in_order(found: Iterable[TracedStep]) -> tuple[TracedStep, ...]:
    return tuple(sorted(found, key=lambda one: (-one.step, one.source != Source.LIVE, one.source)))


def of_step(run: Run, table: Table, traced: TracedStep) -> Lazy:
    """The rows of ``ops`` or ``edges`` that belong to a traced step."""
    return rank_table(run, table, traced.rank, step=traced.step).filter(nw.col("source") == traced.source)


def executed(run: Run, traced: TracedStep) -> tuple[Executed, ...]:
    """Every site that ran in ``traced``, in order of first execution; inputs, parameters and gradients left out."""
    sums = (nw.len().alias("count"), nw.col("numel").sum().alias("elements"), nw.col("seq").min().alias("first"))
    ops = collect(of_step(run, Table.OPS, traced).group_by("site", "out").agg(*sums).sort("first", "out"))
    sites = {site.site: site for site in run.rows(Table.SITES, rank=traced.rank) if site.op not in _NODES}
    by_site: dict[int, list[dict[str, Any]]] = {}
    for row in ops:
        by_site.setdefault(int(row["site"]), []).append(row)
    return tuple(_executed(sites[number], outputs) for number, outputs in by_site.items() if number in sites)


def _executed(site: SiteRow, outputs: list[dict[str, Any]]) -> Executed:
    return Executed(
        site=site,
        count=max(int(row["count"]) for row in outputs),
        elements=int(outputs[0]["elements"]),
        bytes=sum(int(row["elements"]) * _size(site, int(row["out"])) for row in outputs),
        first=min(int(row["first"]) for row in outputs),
    )


def _size(site: SiteRow, out: int) -> int:
    return itemsize(site.out_dtypes[out]) if out < len(site.out_dtypes) else 0


#: The settings that choose by name, and what each chooses.
_CHOOSING = ("modules", "ops", "parameters")
#: Names that are told one by one.
_NAMED = 3


def only_recorded(run: Run) -> str:
    """A note that values elsewhere could not be judged before anything broke; empty where all is recorded."""
    asked = {name: run.manifest.configuration.get(name) for name in _CHOOSING}
    told = [f"{name}={_named(patterns)}" for name, patterns in asked.items() if patterns]
    if not told:
        return ""
    return (
        f"Of healthy steps only a part is recorded ({', '.join(told)}): how near values elsewhere come to overflow, or "
        "to vanishing, is not known."
    )


def _named(patterns: object) -> str:
    """Patterns as they were given to `watch`."""
    if not isinstance(patterns, list):
        return repr(patterns)
    shown = ", ".join(map(repr, patterns[:_NAMED])) + (", ..." if len(patterns) > _NAMED else "")
    return shown if len(patterns) == 1 else f"[{shown}]"
