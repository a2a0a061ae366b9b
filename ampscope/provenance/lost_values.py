"""A step in half precision may lose what the same step in float32 keeps: a value's mass, or its distinct values.

The mass of a value is the sum of its magnitudes. A flush to zero and a saturated function take it away for good, while
ordinary rounding leaves it as it is. So the walk goes from a gradient back along values whose mass is smaller than that
of their counterpart, to the op that made exact zeros of operands which had lost nothing.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from ampscope.provenance.graph import Graph, op_name
from ampscope.provenance.walk import Origin, path_along
from ampscope.trace.dtypes import FINFO, HALF_DTYPES
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, Node, OpRow, Phase, SiteRow

#: Ops that hand on the values they were given; with them, half precision has ops that float32 does without.
HANDS_ON = frozenset({"_to_copy", "clone", "copy", "detach", "alias", "view", "_unsafe_view"})
#: How far behind an op, through ops that hand on, something is looked for.
REACH = 4


class Counterparts:
    """Finds the results in a float32 replay that correspond to those of a step in half precision.

    Args:
        half: The step as it was.
        wide: The same step in float32.
    """

    def __init__(self, half: Graph, wide: Graph) -> None:
        self._half = half
        self._wide = wide
        self._partner = _partners(half, wide)

    def of(self, seq: int, out: int) -> OpRow | None:
        """Returns the float32 result that corresponds to an output; None where float32 has no such op."""
        for _ in range(REACH):
            partner = self._partner.get(seq)
            if partner is not None:
                there = self._wide.output(partner, out)
                return there if (there.out, there.numel) == (out, self._half.output(seq, out).numel) else None
            operands = self._half.inputs[seq]
            if op_name(self._half.site(seq).op) not in HANDS_ON or not operands:
                return None
            read = operands[-1]  # of a copy into memory, what is copied
            if read.partial:
                return None
            seq, out = read.from_seq, read.from_out
        return None


def _partners(half: Graph, wide: Graph) -> dict[int, int]:
    """Maps each op that hands nothing on to the other execution's: the same code, as often run."""
    mine, theirs = _by_point(half), _by_point(wide)
    found: dict[int, int] = {}
    for point, seqs in mine.items():
        others = theirs.get(point, [])
        if len(seqs) == len(others):
            found.update(zip(seqs, others, strict=True))
    return found


def _by_point(graph: Graph) -> dict[tuple[object, ...], list[int]]:
    points: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for seq in sorted(graph.outputs):
        site = graph.site(seq)
        if site.op not in SINK_NODES and op_name(site.op) not in HANDS_ON:
            points[_point(site, graph.outputs[seq][0].micro_batch)].append(seq)
    return points


def _point(site: SiteRow, micro_batch: int) -> tuple[object, ...]:
    op = site.op if site.op in ENTRY_NODES else op_name(site.op)
    return op, site.name, site.module, site.phase, site.grad_fn, site.file, site.line, micro_batch


#: A gradient that has lost this share of its mass is worth a word.
LOST_SHARE = 0.1
#: Smaller losses are followed, for several add up.
_FOLLOWED = LOST_SHARE / 2
#: Share of the elements that have to be zero in half precision alone: rounding makes no zeros.
_NEW_ZEROS = 0.02
#: Functions with a bound that their results round to, which their gradient is zero at.
_SATURATING = frozenset({"sigmoid", "tanh", "_softmax", "erf"})
#: Products; their results are sums of as many terms as their operands share.
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "dot"})
#: Ops that add up: what is left where all terms cancel is float32's own rounding, and no loss.
_ADDS_UP = _PRODUCTS | {
    *("sum", "mean", "add", "sub", "rsub"),
    *("convolution_backward", "_softmax_backward_data", "_log_softmax_backward_data"),
}
#: Ops of whose operands one that is no rounding makes the result none.
_SUMS = frozenset({"add", "sub", "rsub", "cat", "stack", "copy", "index_put", "index_add"})
#: What float32 leaves of a sum that cancels, as a share of its terms.
_CANCELLED = 2.0**-20
#: Doublings above a dtype's smallest number up to which what was rounded before may yet become zero.
_NEAR_SMALLEST = 2


class HowLost(StrEnum):
    """The ways in which the mass of a value is lost."""

    FLUSHED = "flushed"  #: below the dtype's smallest number
    SATURATED = "saturated"  #: a function's result rounded to its bound
    ROUNDED = "rounded"  #: a difference, or a sum, too small beside its operands


class LostMass(NamedTuple):
    """The op at which mass was lost, how, and how much."""

    origin: Origin  #: the op, and its way to the gradient
    how: HowLost
    share: float  #: of the op's own result, or of the gradient that passes a saturated one


def lost_mass(half: Graph, wide: Graph, gradients: Collection[str]) -> LostMass | None:
    """The first op of a step at which gradients lost mass.

    Args:
        half: The step as it was, with every statistic; sinks stand for the gradients in question.
        wide: The same step in float32, with every statistic.
        gradients: Names of the parameters.

    Returns:
        The loss; None where no op explains it.
    """
    pairs = _Pairs(half, wide)
    found: dict[int, LostMass] = {}
    for sink in half.outputs:
        site = half.site(sink)
        if site.op == Node.GRADIENT and site.name in gradients:
            for loss in _walk(pairs, sink):
                found.setdefault(loss.origin.seq, loss)
    return min(found.values(), key=lambda loss: loss.origin.seq, default=None)


def _walk(pairs: _Pairs, sink: int) -> Iterator[LostMass]:
    """Back from a gradient along what has lost mass, and what cannot be compared; gives the losses on the way."""
    half = pairs.half
    towards: dict[int, int] = {sink: -1}
    stack = [sink]
    while stack:
        seq = stack.pop()
        before = 0.0
        for edge in half.inputs[seq]:
            share = pairs.lost(edge.from_seq, edge.from_out)
            if share is not None and share <= _FOLLOWED:
                continue
            before = max(before, share or 0.0)
            if edge.from_seq not in towards and half.site(edge.from_seq).op not in ENTRY_NODES:
                towards[edge.from_seq] = seq
                stack.append(edge.from_seq)
        loss = pairs.loss_at(seq, before) if seq != sink else None
        if loss is not None:
            where, how, share = loss
            path = path_along(towards, seq)
            yield LostMass(Origin(where, 0, path if where == seq else (where, *path), sink), how, share)


class _Pairs:
    """The ops of a step and their counterparts in float32."""

    def __init__(self, half: Graph, wide: Graph) -> None:
        self.half = half
        self._counterpart = Counterparts(half, wide).of
        self._cancelled = cancelled(wide)
        self.lost = cache(self._lost)

    def _lost(self, seq: int, out: int) -> float | None:
        """The share of mass that an output lacks; None where there is nothing to compare it with."""
        there = self._counterpart(seq, out)
        whole = _mass(there) if there is not None else None
        mass = _mass(self.half.output(seq, out))
        if there is None or whole is None or mass is None:
            return None
        return max(0.0, 1.0 - mass / whole) if whole > 0 and there.seq not in self._cancelled else 0.0

    def loss_at(self, seq: int, before: float) -> tuple[int, HowLost, float] | None:
        """The loss that an op made by itself, of operands of which the share ``before`` was lost already."""
        here, there = self.half.output(seq), self._counterpart(seq, 0)
        share = self.lost(seq, 0)
        if there is None or share is None or here.statistics.zeros is None or there.statistics.zeros is None:
            return None
        own = 1.0 - (1.0 - share) / (1.0 - before) if before < 1.0 else 0.0
        if own <= LOST_SHARE or here.statistics.zeros - there.statistics.zeros <= _NEW_ZEROS * here.numel:
            return None
        saturated = next(self._saturated(seq, 0), None)
        if saturated is not None:
            return saturated, HowLost.SATURATED, own
        if not self._is_half(seq):
            return None
        dtype = next(iter(self.half.site(seq).out_dtypes), "")
        return seq, HowLost.FLUSHED if _is_below(there, dtype) else HowLost.ROUNDED, own

    def _is_half(self, seq: int) -> bool:
        site = self.half.site(seq)
        return not HALF_DTYPES.isdisjoint(site.out_dtypes) or not HALF_DTYPES.isdisjoint(site.in_dtypes)

    def _saturated(self, seq: int, depth: int) -> Iterator[int]:
        """The op itself, or what gave it an operand, if that rounded to its bound in half precision alone."""
        site = self.half.site(seq)
        if op_name(site.op) in _SATURATING and site.phase != Phase.BACKWARD:
            here, there = self.half.output(seq), self._counterpart(seq, 0)
            if there is not None and _at_bound(here) - _at_bound(there) > _NEW_ZEROS * here.numel:
                yield seq
        elif depth == 0 or (depth < REACH and op_name(site.op) in HANDS_ON):
            for edge in self.half.inputs[seq]:
                yield from self._saturated(edge.from_seq, depth + 1)


def cancelled(graph: Graph) -> frozenset[int]:
    """The ops whose result is nothing but float32's own rounding: of sums that cancel, and what is made of it.

    The gradient of a bias before a normalisation, or of the bias of keys, is zero by mathematics and noise in float32.
    """
    found: set[int] = set()
    for seq in sorted(graph.outputs):
        site, rows = graph.site(seq), [graph.output(e.from_seq, e.from_out) for e in graph.inputs[seq]]
        name = op_name(site.op)
        if site.op in SINK_NODES or not rows:
            continue
        every = all if name in _SUMS else any
        if every(row.seq in found for row in rows) or (_adds_up(name) and _cancels(graph.output(seq), name, rows)):
            found.add(seq)
    return frozenset(found)


def _adds_up(name: str) -> bool:
    return name in _ADDS_UP or "norm_backward" in name


def _cancels(result: OpRow, name: str, operands: list[OpRow]) -> bool:
    sizes = [row.statistics.max_finite for row in operands if row.statistics.max_finite is not None]
    largest = result.statistics.max_finite
    if not sizes or not largest:
        return False
    size = math.prod(sizes[-2:]) if name in _PRODUCTS else sizes[0]
    terms = max(1.0, max(row.numel for row in operands) / max(1, result.numel))
    if largest > _CANCELLED * size * math.sqrt(terms):
        return False
    # a probability of nearly 1 leaves but rounding of its gradient; what belongs to the others is as small as they are
    share = _typical(operands[1]) if name == "_softmax_backward_data" and len(operands) > 1 else 1.0
    return _typical(result) <= _CANCELLED * size * share if share < 1.0 else True


def _mass(row: OpRow) -> float | None:
    """Sum of the magnitudes by the histogram of their exponents; None where that was not taken."""
    seen = row.statistics
    if seen.zeros is None:
        return None
    if seen.exp_low is None or seen.exp_counts is None:
        return 0.0
    return sum(count * _magnitude(seen.exp_low + place) for place, count in enumerate(seen.exp_counts))


def _typical(row: OpRow) -> float:
    """The median magnitude of the elements that are not zero, to a factor of two; 1 where it was not counted."""
    seen = row.statistics
    if seen.exp_low is None or seen.exp_counts is None:
        return 1.0
    left = sum(seen.exp_counts) / 2
    for exponent, count in enumerate(seen.exp_counts, seen.exp_low):
        left -= count
        if left <= 0:
            return _magnitude(exponent)
    return 1.0


def _magnitude(exponent: int) -> float:
    """Returns the magnitude of an element with that exponent, which may be any number in a damaged trace."""
    return math.ldexp(1.5, min(exponent, sys.float_info.max_exp - 1))


def _at_bound(row: OpRow) -> int:
    """Elements of a saturating function's result that are 0, or 1 in magnitude."""
    return (row.statistics.zeros or 0) + _elements(row, lambda exponent: exponent >= 0)


def _is_below(row: OpRow, dtype: str) -> bool:
    """Whether elements that are not zero would become zero in a dtype."""
    if dtype not in FINFO:
        return False
    lost = FINFO[dtype].lowest + _NEAR_SMALLEST
    return _elements(row, lambda exponent: exponent < lost) > _NEW_ZEROS * row.numel


def _elements(row: OpRow, of: Callable[[int], bool]) -> int:
    seen = row.statistics
    if seen.exp_low is None or seen.exp_counts is None:
        return 0
    return sum(count for exponent, count in enumerate(seen.exp_counts, seen.exp_low) if of(exponent))


#: With fewer different values than these nothing is said.
FEWEST_VALUES = 16
#: Of values in order, where neighbours become one, so large a share has to be left for nothing to be said.
_ENOUGH_LEFT = 2 / 3
#: Of values in any order, which may be measurements too, so many have to become one.
_INTO_ONE = 8
#: Of numbers that pick rows, such a share may be another number.
_FEW_CHANGED = 0.01
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
    changed: int = 0  #: elements of the sample that are another number after the cast
    of: int = 0  #: elements that the sample has

    @property
    def become_others(self) -> bool:
        """Whether so many numbers are others after the cast that the rows which they pick are."""
        return self.changed > _FEW_CHANGED * self.of


def collapsed(graph: Graph, counts: Mapping[int, DistinctValues]) -> dict[int, DistinctValues]:
    """Returns the casts that lost much of what they read, where what is left reaches the loss, with their counts.

    Of positions and the like a third, of values in no order more than half; of whole numbers that become an index
    those that are another number, for it picks another row. Where they become none, none counts as changed.

    Args:
        graph: The ops of the step.
        counts: Of some casts of the step, what was counted, by number. What they read numbers something.
    """
    found = {}
    for seq, count in sorted(counts.items()):
        if seq in graph.outputs and count.before >= FEWEST_VALUES:
            renumbers = count.become_others and _becomes_index(graph, seq)
            if (renumbers or _is_gross(graph, seq, count)) and _matters(graph, seq):
                found[seq] = count if renumbers else count._replace(changed=0)
    return found


def _is_gross(graph: Graph, seq: int, count: DistinctValues) -> bool:
    if count.ordered:
        return count.after < _ENOUGH_LEFT * count.before
    many_became_one = count.certain and count.before >= _INTO_ONE * count.after
    return many_became_one or (2 * count.after < count.before and _identifies(graph, seq))


def _identifies(graph: Graph, seq: int) -> bool:
    """Whether what a cast gave is compared with each other, or made an index of: then each value means something."""
    read_by = [graph.site(edge.seq) for edge in graph.readers[seq]]
    compared = any(op_name(site.op) in ("eq", "ne") and len(site.in_dtypes) > 1 for site in read_by)
    return compared or _becomes_index(graph, seq)


def _becomes_index(graph: Graph, seq: int) -> bool:
    """Whether what a cast gave is made whole numbers again, or was before the step began."""
    if any(dtype in _INTEGERS for dtype in graph.site(seq).out_dtypes):
        return True
    read_by = [graph.site(edge.seq) for edge in graph.readers[seq]]
    return any(site.cast and any(dtype in _INTEGERS for dtype in site.out_dtypes) for site in read_by)


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
