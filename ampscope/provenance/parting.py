"""Finds where two executions of one step part: the proof, or its gap, that only chance lies between them."""

from __future__ import annotations

import math
from collections import defaultdict
from enum import StrEnum
from typing import NamedTuple

from ampscope.provenance.graph import Graph
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, EdgeRow, OpRow

#: Results whose largest magnitudes differ by less than this factor may be roundings of one number.
_FAR = 2.0


class How(StrEnum):
    """The kinds of differences by which two executions part."""

    RESULT = "result"  #: of one op, on operands that are the same to the last bit, as far as was measured
    DIGITS = "digits"  #: likewise, by no more than another order of summation makes
    GIVEN = "given"  #: what came from outside the step
    DRAWN = "drawn"  #: random numbers
    CALLS = "calls"  #: the other has no such op, or gave it the results of other ops
    UNMEASURED = "unmeasured"  #: of this op there is nothing to compare


class Parting(NamedTuple):
    """The first op, in order of execution, of which the executions do not say the same."""

    seq: int  #: in the first of them
    how: How


def parting(real: Graph, again: Graph, until: int) -> Parting | None:
    """Finds the first op at which an execution of a step parts from another, among an op and all that led to it.

    Args:
        real: The execution that went wrong, with extremes at least.
        again: Another one, of the same program points.
        until: The op, by its number in ``real``.

    Returns:
        The first difference; None where all is the same to the last bit, as far as it was measured.
    """
    led = _leading_to(real, [until])
    partner = _partners(real, again)
    for seq in sorted(led):
        how = _differs(real, again, seq, partner)
        if how is not None:
            return Parting(seq, how)
    return None


def _differs(real: Graph, again: Graph, seq: int, partner: dict[int, int]) -> How | None:
    there = partner.get(seq)
    if there is None or not _same_operands(real, again, seq, partner):
        return How.CALLS
    ours, theirs = ({row.out: row for row in graph.outputs[n]} for graph, n in ((real, seq), (again, there)))
    if {out: row.numel for out, row in ours.items()} != {out: row.numel for out, row in theirs.items()}:
        return How.CALLS
    pairs = [(row, theirs[out]) for out, row in ours.items() if row.numel]
    is_entry = real.site(seq).op in ENTRY_NODES
    how = _apart(pairs, is_entry=is_entry)
    return How.UNMEASURED if how in (How.RESULT, How.DIGITS) and not _knows_operands(again, there) else how


def _apart(pairs: list[tuple[OpRow, OpRow]], *, is_entry: bool) -> How | None:
    """How results differ, as far as they were measured."""
    if any(one.checksum != other.checksum for one, other in pairs):
        return How.GIVEN if is_entry else How.DRAWN
    if any(one.min is None or other.min is None or (is_entry and one.checksum is None) for one, other in pairs):
        return How.UNMEASURED
    if all(_same(one, other) for one, other in pairs):
        return None
    return How.RESULT if any(_is_far(one, other) for one, other in pairs) else How.DIGITS


def _same_operands(real: Graph, again: Graph, seq: int, partner: dict[int, int]) -> bool:
    """Whether the counterparts of what gave an op its operands gave the counterpart its own."""
    ours = {(edge.arg, partner.get(edge.from_seq), edge.from_out) for edge in real.inputs[seq]}
    return ours == {(edge.arg, edge.from_seq, edge.from_out) for edge in again.inputs[partner[seq]]}


def _knows_operands(graph: Graph, seq: int) -> bool:
    """Whether all that an op read was written before its eyes: memory is also handed out as others left it."""
    shapes = graph.site(seq).in_shapes
    return all(_is_covered(graph, edge, shapes[edge.arg : edge.arg + 1]) for edge in graph.inputs[seq] if edge.partial)


def _is_covered(graph: Graph, edge: EdgeRow, shape: tuple[str, ...]) -> bool:
    """Whether the writer of an operand, or one whose result it changed in place, wrote as much as is read."""
    read = math.prod(int(size) for each in shape for size in each.split("x") if size)
    seq, out, seen = edge.from_seq, edge.from_out, set[int]()
    while graph.output(seq, out).numel < read:
        before = next((each for each in graph.inputs[seq] if each.in_place), None)
        if before is None or seq in seen:
            return False
        seen.add(seq)
        seq, out = before.from_seq, before.from_out
    return True


def _same(one: OpRow, other: OpRow) -> bool:
    return all(_equal(*pair) for pair in ((one.min, other.min), (one.max, other.max)))


def _equal(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


def _is_far(one: OpRow, other: OpRow) -> bool:
    """Whether one is finite and the other is not, or both are and no rounding lies between them."""
    ours, theirs = _largest(one), _largest(other)
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return True
    return max(ours, theirs) >= _FAR * min(ours, theirs)


def _largest(row: OpRow) -> float:
    ends = [abs(end) for end in (row.min, row.max) if end is not None]
    return math.nan if any(map(math.isnan, ends)) else max(ends, default=math.nan)


def _leading_to(graph: Graph, seqs: list[int]) -> set[int]:
    """Ops, and all that led to them."""
    found, waiting = set(seqs), list(seqs)
    while waiting:
        for edge in graph.inputs[waiting.pop()]:
            if edge.from_seq not in found:
                found.add(edge.from_seq)
                waiting.append(edge.from_seq)
    return found


def _partners(real: Graph, again: Graph) -> dict[int, int]:
    """Maps each op to its counterpart: the same program point, as often run.

    The real execution may also hold what led to no loss and no gradient, which nobody ran again; where a program point
    ran more often there, only what did is counted.
    """
    ours, theirs = _by_point(real, set(real.outputs)), _by_point(again, set(again.outputs))
    sinks = [seq for seq in real.outputs if real.site(seq).op in SINK_NODES]
    needed = _by_point(real, _leading_to(real, sinks))
    found: dict[int, int] = {}
    for point, others in theirs.items():
        for seqs in (ours[point], needed[point]):
            if len(seqs) == len(others):
                found.update(zip(seqs, others, strict=True))
                break
    return found


def _by_point(graph: Graph, among: set[int]) -> defaultdict[tuple[int, int], list[int]]:
    points: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for seq in sorted(among):
        row = graph.outputs[seq][0]
        points[row.site, row.micro_batch].append(seq)
    return points
