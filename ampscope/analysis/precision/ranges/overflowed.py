"""The places that gave infinities of finite numbers, in the steps that went wrong."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ampscope.analysis.origin.op_facts import LOGARITHMS, Executed, divides
from ampscope.analysis.origin.step_graph import Sites, StepGraph
from ampscope.analysis.precision.ranges.places import Place, place_of
from ampscope.analysis.precision.ranges.sampled_steps import Sampled
from ampscope.provenance import is_deliberate
from ampscope.trace.read.run import Run
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, OpRow, Table

#: Steps that are looked at: the newest that went wrong.
MOST_STEPS = 16


class Overflowed(NamedTuple):
    """The steps in which places overflowed, a step as often as its results did."""

    steps: Mapping[Place, Sequence[int]]
    is_whole: bool  #: whether all traced steps that went wrong were looked at, not the newest alone


#: Of what nobody looked at.
NONE = Overflowed({}, True)


def overflowed(run: Run, rank: int, sampled: Sampled) -> Overflowed:
    """The steps in which each place gave an infinity though all that it read was finite; masks and poles are none.

    A step is there as often as that happened in it.
    """
    wrong = {row.step for row in run.rows(Table.INCIDENTS, rank=rank)} - set(sampled.unlike)
    traced = [each for each in run.traced(rank) if each.step in wrong and each.source in sampled.optimizers]
    sites, found = Sites(run, rank), defaultdict[Place, list[int]](list)
    once = {(each.step, sampled.optimizers[each.source]): each for each in traced}  # as it ran or in its replay
    newest = sorted(once.values(), key=lambda one: -one.step)
    for each in newest[:MOST_STEPS]:
        graph = StepGraph(run, sites, each.step, each.source)
        infinite = [seq for seq, rows in graph.outputs.items() if any(map(_has_infinity, rows))]
        for seq in infinite:
            place = _overflowed_at(graph, seq, sampled.optimizers[each.source])
            if place is not None:
                found[place].append(each.step)
    return Overflowed(found, len(newest) <= MOST_STEPS)


def _overflowed_at(graph: StepGraph, seq: int, optimizer: int) -> Place | None:
    row, site = graph.bad_output(seq), graph.site(seq)
    if row is None or site.op in ENTRY_NODES | SINK_NODES or not _has_infinity(row):
        return None
    if graph.bad_inputs(seq) or graph.is_cut(seq) or is_deliberate(graph, seq) or _is_at_a_pole(Executed(graph, seq)):
        return None
    return place_of(site, row.out, optimizer)


def _is_at_a_pole(op: Executed) -> bool:
    """Whether what it gives is infinite in every dtype: the logarithm of zero, or a division by it."""
    return op.name in LOGARITHMS or (divides(op.site.op) and op.divides_by_zero)


def _has_infinity(row: OpRow) -> bool:
    return any(end is not None and math.isinf(end) for end in (row.min, row.max))
