"""Reads off a replay's own records where the failure lies: the modules to change, and how a changed replay went."""

from __future__ import annotations

import math
from typing import NamedTuple

from ampscope import provenance
from ampscope.capture.tracing.sites import Sites
from ampscope.trace.schema import ENTRY_NODES, LOSS_CODE, EdgeRow, OpRow, Phase, SiteRow

_HALF = frozenset({"float16", "bfloat16"})
#: What float16 ends at.
_LARGEST = 65504.0


class Observed(NamedTuple):
    """What a tracer saw of one replay."""

    ops: list[OpRow]
    edges: list[EdgeRow]
    sites: Sites

    def bytes_written(self) -> int:
        """Size of everything the forward's ops wrote, were it float32: a bound on what another run keeps."""
        kept = (Phase.FORWARD, Phase.LOSS)
        forward = {site.site for site in _sites_of(self) if site.phase in kept}
        return sum(4 * row.numel for row in self.ops if row.site in forward)

    def labelled(self, step: int, source: str) -> tuple[list[OpRow], list[EdgeRow]]:
        """The rows as those of a step and of one of its executions."""
        ops = [row._replace(step=step, source=source) for row in self.ops]
        return ops, [edge._replace(step=step, source=source) for edge in self.edges]

    def agrees(self, other: Observed) -> bool:
        """Whether another replay gave the same results, as far as their extremes tell."""
        if len(self.ops) != len(other.ops):
            return False
        pairs = zip(self.ops, other.ops, strict=True)
        return all(_same(ours.min, theirs.min) and _same(ours.max, theirs.max) for ours, theirs in pairs)


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


class Spot(NamedTuple):
    """An op of the step, however it is executed: the dtypes may differ."""

    op: str
    module: str
    phase: str
    file: str
    line: int
    grad_fn: str

    @staticmethod
    def of(site: SiteRow) -> Spot:
        """The spot of a site."""
        return Spot(site.op, site.module, site.phase, site.file, site.line, site.grad_fn)


class Suspect(NamedTuple):
    """Where a replay places the failure."""

    spot: Spot
    turn: int  #: how many executions of the spot came before
    modules: tuple[str, ...]  #: in which values went wrong; `LOSS_CODE` for the code outside
    dtypes: frozenset[str]  #: half dtypes that the step computed in
    by_scale: bool  #: the loss scale takes part: a scaled loss or a gradient is out of range


def suspect(seen: Observed, *, scaled: bool) -> Suspect | None:
    """The failure's place by the records of a replay; None where nothing non-finite reached what matters.

    Args:
        seen: The records.
        scaled: Whether the step has a loss scale.
    """
    graph = provenance.Graph(seen.ops, seen.edges, seen.sites.row)
    born = provenance.origins(graph)
    if not born:
        return None
    first = graph.site(born[0].seq)
    outside = first.phase == Phase.LOSS and first.op.startswith("aten.mul.")  # the scaling itself, of a half loss
    return Suspect(
        spot=Spot.of(first),
        turn=sum(row.seq < born[0].seq and Spot.of(seen.sites.row(row.site)) == Spot.of(first) for row in seen.ops),
        modules=tuple(dict.fromkeys(_module(graph, origin.seq) for origin in born)),
        dtypes=frozenset(dtype for number in _sites_of(seen) for dtype in number.out_dtypes if dtype in _HALF),
        by_scale=scaled and (first.phase == Phase.BACKWARD or outside),
    )


def _module(graph: provenance.Graph, seq: int) -> str:
    """The module in which an op runs; of a value from outside, the module that first reads it."""
    site = graph.site(seq)
    if site.op in ENTRY_NODES:
        readers = sorted(edge.seq for edge in graph.readers[seq])
        site = graph.site(readers[0]) if readers else site
    return site.module or (LOSS_CODE if site.phase == Phase.LOSS else "")


def _sites_of(seen: Observed) -> list[SiteRow]:
    return [seen.sites.row(number) for number in {row.site for row in seen.ops}]


def output_at(seen: Observed, found: Suspect) -> OpRow | None:
    """What the suspected op gave in another replay; None where it was not executed."""
    spots = {number: Spot.of(seen.sites.row(number)) for number in {row.site for row in seen.ops}}
    executions = [row for row in seen.ops if not row.out and spots[row.site] == found.spot]
    return executions[found.turn] if found.turn < len(executions) else None


def room_for_scale(seen: Observed) -> float | None:
    """How many times larger the loss scale could be before a float16 gradient leaves its range.

    Returns:
        The ratio of float16's largest value to the largest float16 gradient seen; None where there was none.
    """
    sites = {row.site: row for row in _sites_of(seen)}
    largest = 0.0
    for row in seen.ops:
        site = sites[row.site]
        if site.phase == Phase.BACKWARD and site.out_dtypes[row.out : row.out + 1] == ("float16",):
            ends = [abs(end) for end in (row.min, row.max) if end is not None and end - end == 0]
            largest = max([largest, *ends])
    return _LARGEST / largest if largest else None
