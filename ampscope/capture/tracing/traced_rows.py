"""The rows that tracing one execution of a step gave, with their program points."""

from __future__ import annotations

import math
from typing import NamedTuple

from ampscope import provenance
from ampscope.capture.tracing.sites import Sites
from ampscope.trace.schema import EdgeRow, OpRow, Phase, SiteRow


class TracedRows(NamedTuple):
    """Ops and edges of one execution of a step, and the sites that they number."""

    ops: list[OpRow]
    edges: list[EdgeRow]
    sites: Sites

    def graph(self) -> provenance.Graph:
        """The rows as a graph, to walk back from what is not finite."""
        return provenance.Graph(self.ops, self.edges, self.sites.row)

    def site_rows(self) -> dict[int, SiteRow]:
        """The sites at which its ops ran, by number."""
        return {number: self.sites.row(number) for number in {row.site for row in self.ops}}

    def bytes_written(self) -> int:
        """Size of everything the forward's ops wrote, were it float32: a bound on what another run keeps."""
        kept = (Phase.FORWARD, Phase.LOSS)
        forward = {number for number, site in self.site_rows().items() if site.phase in kept}
        return sum(4 * row.numel for row in self.ops if row.site in forward)

    def labelled(self, step: int, source: str) -> tuple[list[OpRow], list[EdgeRow]]:
        """The rows as those of a step and of one of its executions."""
        ops = [row._replace(step=step, source=source) for row in self.ops]
        return ops, [edge._replace(step=step, source=source) for edge in self.edges]

    def agrees(self, other: TracedRows) -> bool:
        """Whether another execution gave the same results, as far as their extremes tell."""
        if len(self.ops) != len(other.ops):
            return False
        pairs = zip(self.ops, other.ops, strict=True)
        return all(_same(ours.min, theirs.min) and _same(ours.max, theirs.max) for ours, theirs in pairs)


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))
