"""Finds overflows that the code itself took for numbers: ``nan_to_num``, ``where(isfinite(x), ...)``, ``clamp``.

The trace of a step shows where that was done. Whether it did harm, it does not: a mask, a bound that any large number
would have come to, and a value that nobody needs look the same. The same step in float32 tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterator

from ampscope.provenance.absorbed import absorbed, reaches
from ampscope.provenance.counterparts import Counterparts
from ampscope.provenance.graph import Graph, is_finite
from ampscope.provenance.walk import Origin, is_deliberate, path_along
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, Node, OpRow, Phase, Statistics

#: The dtype whose range ends long before float32's does.
_NARROW = "float16"
#: Results whose largest magnitudes differ by less than this share may be roundings of one number,
_ROUNDED = 0.02
#: and so may those of which a smaller share of elements has another exponent.
_MOVED = 0.01


def hidden(graph: Graph) -> list[Origin]:
    """Overflows of float16 that an op made finite numbers of, other than by a division; see `absorbed`.

    Args:
        graph: The ops of a step.

    Returns:
        Each with the way to an op that hid it, which is the ``sink``; one overflow may be hidden by several.
    """
    divided = {origin.seq for origin in absorbed(graph)}
    found = []
    for seq in sorted(graph.outputs):
        row = graph.bad_output(seq)
        if row is not None and seq not in divided and _overflows(graph, seq, row):
            found += [Origin(seq, row.out, path, path[-1]) for path in _ways(graph, seq)]
    return found


def hidden_beside(half: Graph, wide: Graph) -> list[Origin]:
    """Finds the hidden overflows for which float32 has other, finite numbers, and that a loss or gradient depends on.

    Args:
        half: The step as it was, with every statistic.
        wide: The same step in float32, with every statistic.

    Returns:
        Each once, with the first op that hid it.
    """
    there = Counterparts(half, wide)
    found: dict[int, Origin] = {}
    for each in hidden(half):
        born = half.output(each.seq, each.out)
        if each.seq not in found and _fits(born, there.of(each.seq, each.out)) and _differs(half, there, each.sink):
            found[each.seq] = each
    return [each for each in found.values() if reaches(half, each.sink, (Node.LOSS, Node.GRADIENT))]


def _overflows(graph: Graph, seq: int, row: OpRow) -> bool:
    site = graph.site(seq)
    if site.op in ENTRY_NODES or site.op in SINK_NODES or site.phase == Phase.OPTIMIZER:
        return False
    narrow = site.out_dtypes[row.out : row.out + 1] == (_NARROW,)
    return narrow and not graph.bad_inputs(seq) and not graph.is_cut(seq) and not is_deliberate(graph, seq)


def _ways(graph: Graph, seq: int) -> Iterator[tuple[int, ...]]:
    """The ways from what is not finite to the ops whose results are, in the order in which these ran."""
    towards, queue, ends = {seq: -1}, [seq], []
    while queue:
        here = queue.pop(0)
        for edge in graph.readers[here]:
            if edge.seq in towards or edge not in graph.bad_inputs(edge.seq):
                continue
            towards[edge.seq] = here
            if graph.bad_output(edge.seq) is not None:
                queue.append(edge.seq)
            elif any("float" in dtype for dtype in graph.site(edge.seq).out_dtypes):  # a comparison only looks
                ends.append(edge.seq)
    for end in sorted(ends):
        yield path_along(towards, end)[::-1]


def _fits(born: OpRow, there: OpRow | None) -> bool:
    """Whether float32 has numbers for more of the elements."""
    return there is not None and _not_finite(born.statistics) > _not_finite(there.statistics)


def _not_finite(seen: Statistics) -> int:
    return sum(count or 0 for count in (seen.nan, seen.posinf, seen.neginf))


def _differs(half: Graph, counterparts: Counterparts, seq: int) -> bool:
    """Whether what hid an infinity gave other numbers than float32 has there; where that did not run, it did."""
    here, there = half.output(seq), counterparts.of(seq, 0)
    if there is None:
        return True
    if not is_finite(there.min, there.max):
        return False
    one, other = here.statistics, there.statistics
    largest = max(one.max_finite or 0.0, other.max_finite or 0.0)
    apart = abs((one.max_finite or 0.0) - (other.max_finite or 0.0)) > _ROUNDED * largest
    return apart or _moved(one, other) > _MOVED * here.numel


def _moved(one: Statistics, other: Statistics) -> float:
    """How many elements have other exponents, or are zero on one side alone."""
    ours, theirs = _counts(one), _counts(other)
    return sum(abs(ours.get(place, 0) - theirs.get(place, 0)) for place in ours.keys() | theirs.keys()) / 2


def _counts(seen: Statistics) -> dict[int | None, int]:
    """Elements by exponent; under None those that are zero."""
    counts: dict[int | None, int] = {None: seen.zeros or 0}
    if seen.exp_low is not None and seen.exp_counts is not None:
        counts |= dict(enumerate(seen.exp_counts, seen.exp_low))
    return counts
