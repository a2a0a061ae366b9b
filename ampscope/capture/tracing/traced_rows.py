"""The rows that tracing one execution of a step gives, with their program points."""

from __future__ import annotations

import math
from typing import NamedTuple

from ampscope import provenance
from ampscope.capture.tracing.flow.dataflow import Dataflow
from ampscope.capture.tracing.flow.outputs import Outputs
from ampscope.capture.tracing.sites import Sites
from ampscope.capture.tracing.statistics import checksums
from ampscope.trace.schema import UNMEASURED, EdgeRow, OpRow, Phase, SiteRow, Statistics


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


def rows(outputs: Outputs, dataflow: Dataflow, step: int, source: str) -> tuple[list[OpRow], list[EdgeRow]]:
    """The trace's rows; waits for the device to have written what was measured."""
    measured: dict[int | None, Statistics] = {None: UNMEASURED, **dict(enumerate(outputs.measured()))}
    sums = dict(zip(outputs.checksums, checksums.read(list(outputs.checksums.values())), strict=True))
    places = [(seq, out) for seq, made in enumerate(outputs.ops) for out in range(len(made.numels))]
    batch = -1
    ops = []
    for row, (seq, out) in enumerate(places):
        while batch + 1 < len(outputs.micro_batches) and row >= outputs.micro_batches[batch + 1]:
            batch += 1
        made = outputs.ops[seq]
        known = measured[outputs.measurements[row]]
        ops.append(OpRow(step, source, seq, out, made.site, batch, made.numels[out], sums.get(row), known))
    readers = [(seq, *edge) for seq, made in enumerate(outputs.ops) for edge in made.edges]
    edges = []
    for place, ((seq, arg, in_place), writer) in enumerate(zip(readers, dataflow.read_from, strict=True)):
        part = dataflow.parts.get(place)
        own = None if part is None else measured[part]
        low, high = (own.min, own.max) if own is not None else (None, None)
        edges.append(EdgeRow(step, source, seq, arg, *places[writer], in_place, own is not None, low, high))
    return ops, edges


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))
