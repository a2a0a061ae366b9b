"""Which values of a step are not finite because the code wants them so: masks of -inf, and what they alone make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ampscope.analysis.numerics.arrays import Columns
from ampscope.analysis.tables.traced_steps import TracedStep
from ampscope.provenance import Graph, Harmless, harmless_births, is_deliberate, names_infinity
from ampscope.trace.schema import EdgeRow, OpRow, SiteRow, Statistics


def intended(traced: TracedStep, ops: Columns, edges: Columns, sites: Mapping[int, SiteRow]) -> set[int]:
    """Sequence numbers of the ops that wrote a mask, or carry one that does no harm.

    Args:
        traced: The step.
        ops: Its rows by sequence number and output.
        edges: Its rows by reader, of which both ends are among ``ops``.
        sites: Program points by number.
    """
    masks = _possible_masks(ops, sites)
    if not masks:
        return set()
    graph = Graph(_op_rows(traced, ops), _edge_rows(traced, edges), sites.__getitem__)
    queue = [birth.seq for birth in harmless_births(graph, masks) if birth.why is Harmless.MASK]
    found = set(queue)
    while queue:
        bad = {edge.seq for edge in graph.readers[queue.pop()] if graph.edge_is_bad(edge)}
        fresh = {seq for seq in bad - found if graph.bad_output(seq) is not None}
        found |= fresh
        queue.extend(fresh)
    return found.union(seq for seq in masks if is_deliberate(graph, seq) and not graph.bad_inputs(seq))


def _possible_masks(ops: Columns, sites: Mapping[int, SiteRow]) -> list[int]:
    """The ops of whose outputs the first that is not finite holds no NaN, and may be meant by its looks."""
    low, high = ops.floats("min"), ops.floats("max")
    bad = np.flatnonzero(ops.bad("min") | ops.bad("max"))
    first = bad[np.unique(ops.ints("seq")[bad], return_index=True)[1]]
    first = first[~(np.isnan(low) & ops.known("min"))[first]]
    seq = ops.ints("seq")[first]
    numbers, site = np.unique(ops.ints("site")[np.searchsorted(ops.ints("seq"), seq)], return_inverse=True)
    told = np.array([names_infinity(sites[number]) for number in numbers.tolist()], np.bool_)[site]
    mask = (low == -np.inf) & (high < np.inf)
    return [int(each) for each in seq[told | mask[first]]]


def _op_rows(traced: TracedStep, ops: Columns) -> Iterator[OpRow]:
    names = ("seq", "out", "site", "micro_batch", "numel", "min", "max")
    for seq, out, site, batch, numel, low, high in zip(*(ops.arrays[name].tolist() for name in names), strict=True):
        yield OpRow(traced.step, traced.source, seq, out, site, batch, numel, None, Statistics(low, high))


def _edge_rows(traced: TracedStep, edges: Columns) -> Iterator[EdgeRow]:
    names = ("seq", "arg", "from_seq", "from_out", "in_place", "partial", "min", "max")
    for values in zip(*(edges.arrays[name].tolist() for name in names), strict=True):
        yield EdgeRow(traced.step, traced.source, *values)
