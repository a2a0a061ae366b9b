"""Finds casts in which many different values became few, and after which the step goes on with the few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ampscope.provenance.graph import Graph, op_name
from ampscope.trace.schema import Phase

#: With fewer different values than these nothing is said.
FEWEST_VALUES = 16
#: Of values in order, where neighbours become one, so large a share has to be left for nothing to be said.
_ENOUGH_LEFT = 2 / 3
#: Of values in any order, which may be measurements too, so many have to become one.
_INTO_ONE = 8
_COMPARISONS = frozenset({"eq", "ne", "gt", "ge", "lt", "le"})
#: Ops that make few values of many on purpose; what the cast lost before may not matter to them.
_COARSE = frozenset({"sign", "clamp", "clamp_min", "clamp_max", "floor_divide", "floor", "round", "bucketize"})
_INTEGERS = frozenset({"int16", "int32", "int64"})


class DistinctValues(NamedTuple):
    """How many different values a cast read and gave, on a sample."""

    before: int
    after: int
    ordered: bool  #: those before rise, or fall, nearly throughout
    certain: bool = True  #: they number something; else that shows only where they are used so


def collapsed(graph: Graph, counts: Mapping[int, DistinctValues]) -> list[int]:
    """The casts that lost much of what they read, where what is left reaches the loss.

    Of positions and the like a third, of values in no order more than half.

    Args:
        graph: The ops of the step.
        counts: Of some casts of the step, what was counted, by number. What they read numbers something.
    """
    gross = (seq for seq in sorted(counts) if seq in graph.outputs and _is_gross(graph, seq, counts[seq]))
    return [seq for seq in gross if _matters(graph, seq)]


def _is_gross(graph: Graph, seq: int, count: DistinctValues) -> bool:
    if count.before < FEWEST_VALUES:
        return False
    if count.ordered:
        return count.after < _ENOUGH_LEFT * count.before
    many_became_one = count.certain and count.before >= _INTO_ONE * count.after
    return many_became_one or (2 * count.after < count.before and _identifies(graph, seq))


def _identifies(graph: Graph, seq: int) -> bool:
    """Whether what a cast gave is compared with each other, or made an index of: then each value means something."""
    for edge in graph.readers[seq]:
        site = graph.site(edge.seq)
        same = op_name(site.op) in ("eq", "ne") and len(site.in_dtypes) > 1
        if same or (site.cast and any(dtype in _INTEGERS for dtype in site.out_dtypes)):
            return True
    return False


def _matters(graph: Graph, seq: int) -> bool:
    """Whether backward reads what became of the values; of a step traced without it, whether its last op does."""
    phases = {number: graph.site(number).phase for number in graph.outputs}
    ends = {number for number, phase in phases.items() if phase == Phase.BACKWARD}
    ends = ends or {max(number for number, phase in phases.items() if phase)}  # the sinks have none
    seen, queue = {seq}, [seq]
    while queue:
        for edge in graph.readers[queue.pop()]:
            if edge.seq in ends:
                return True
            if edge.seq not in seen and not _is_coarse(graph, edge.seq):
                seen.add(edge.seq)
                queue.append(edge.seq)
    return False


def _is_coarse(graph: Graph, seq: int) -> bool:
    site = graph.site(seq)
    name = op_name(site.op)
    with_constant = name in _COMPARISONS and len(site.in_dtypes) == 1
    return with_constant or name in _COARSE or (bool(site.cast) and "bool" in site.out_dtypes)
