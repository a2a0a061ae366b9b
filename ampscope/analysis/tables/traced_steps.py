"""The ops of one traced step are counted by site, where the query engine sums up, as far as the run recorded them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import narwhals as nw

from ampscope.analysis.rounding import itemsize
from ampscope.analysis.tables.lazy_tables import Lazy, collect, first_rank, remembered
from ampscope.trace.files.parquet_part import ExecutionRows
from ampscope.trace.read.run import Run
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
class ExecutedSite:
    """A site and what ran there in one traced step."""

    site: SiteRow
    count: int  #: executions
    elements: int  #: of the first output, over all executions
    bytes: int  #: of all outputs
    first: int  #: sequence number of the first execution


@remembered(Table.OPS)
def traced_rows(run: Run, rank: int) -> Sequence[ExecutionRows]:
    """How many rows there are of each execution that a rank has traced, in no order."""
    return tuple(run.traced(rank))


def traced_steps(run: Run, *, rank: int | None = None) -> tuple[TracedStep, ...]:
    """Returns the traced executions, the newest step first; of one step the live trace first, then replays by name."""
    return _traced_steps(run, first_rank(run) if rank is None else rank)


@remembered(Table.OPS)
def _traced_steps(run: Run, rank: int) -> tuple[TracedStep, ...]:
    return _in_order(_as_steps(rank, traced_rows(run, rank)))


def first_traced_steps(run: Run, *, rank: int, count: int) -> tuple[TracedStep, ...]:
    """The first ``count`` of what was traced, the oldest first, without putting all that was in order."""
    counted = traced_rows(run, rank)
    last = max(heapq.nsmallest(count, {each.step for each in counted}), default=-1)
    early = [each for each in counted if each.step <= last]
    return _in_order(_as_steps(rank, early))[::-1][:count]


def _as_steps(rank: int, counted: Iterable[ExecutionRows]) -> Iterator[TracedStep]:
    return (TracedStep(rank=rank, step=step, source=source, rows=rows) for step, source, rows in counted)


def _in_order(found: Iterable[TracedStep]) -> tuple[TracedStep, ...]:
    return tuple(sorted(found, key=lambda one: (-one.step, one.source != Source.LIVE, one.source)))


def of_step(run: Run, table: Table, traced: TracedStep) -> Lazy:
    """The rows of ``ops`` or ``edges`` that belong to a traced step."""
    return run.table(table, step=traced.step, rank=traced.rank).filter(nw.col("source") == traced.source)


def executed(run: Run, traced: TracedStep) -> tuple[ExecutedSite, ...]:
    """Every site that ran in ``traced``, in order of first execution; inputs, parameters and gradients left out."""
    sums = (nw.len().alias("count"), nw.col("numel").sum().alias("elements"), nw.col("seq").min().alias("first"))
    ops = collect(of_step(run, Table.OPS, traced).group_by("site", "out").agg(*sums).sort("first", "out"))
    sites = {site.site: site for site in run.rows(Table.SITES, rank=traced.rank) if site.op not in _NODES}
    by_site: dict[int, list[dict[str, Any]]] = {}
    for row in ops:
        by_site.setdefault(int(row["site"]), []).append(row)
    return tuple(_executed(sites[number], outputs) for number, outputs in by_site.items() if number in sites)


def _executed(site: SiteRow, outputs: list[dict[str, Any]]) -> ExecutedSite:
    return ExecutedSite(
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
