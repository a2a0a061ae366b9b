"""The dataflow of one traced step: which op wrote what another read, and whether it was finite."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ampscope.trace.schema import COLLECTIVE_LIBRARIES, SINK_NODES, EdgeRow, Node, OpRow, SiteRow
from ampscope.trace.schema.tables import details

#: Sinks in the order in which their origins are told.
_IMPORTANCE = {
    Node.LOSS: 0,
    Node.STATE_AFTER: 1,
    Node.WEIGHT_AFTER: 2,
    Node.GRADIENT: 3,
    Node.BUFFER_AFTER: 4,
    Node.CARRIED_AFTER: 5,
}
#: In-place ops that do not read what they overwrite.
_OVERWRITES = frozenset({"aten.copy_.default", "aten.zero_.default", "aten.fill_.Scalar", "aten.fill_.Tensor"})
#: Functions that are finite at -inf: an infinity in what they give does not come from there.
_FINITE_AT_MINUS_INFINITY = frozenset({"exp", "exp2", "expm1"})


class Graph:
    """The dataflow of one traced step.

    Args:
        ops: Op rows of one step and source.
        edges: Its edges.
        site: The site row with a number.
    """

    def __init__(self, ops: Iterable[OpRow], edges: Iterable[EdgeRow], site: Callable[[int], SiteRow]) -> None:
        self.outputs: dict[int, list[OpRow]] = defaultdict(list)
        self.inputs: dict[int, list[EdgeRow]] = defaultdict(list)
        self.readers: dict[int, list[EdgeRow]] = defaultdict(list)
        self._bad_outputs: dict[int, OpRow] = {}  # of each op that has any, the first
        for row in ops:
            self.outputs[row.seq].append(row)
            if not _row_is_finite(row):
                self._bad_outputs.setdefault(row.seq, row)
        for edge in edges:
            if edge.seq in self.outputs and edge.from_seq in self.outputs:  # a disk budget may have cut rows away
                self.inputs[edge.seq].append(edge)
                self.readers[edge.from_seq].append(edge)
        self._site = site
        self._bad_inputs: dict[int, list[EdgeRow]] = {}  # asked for once from every sink

    def site(self, seq: int) -> SiteRow:
        """The program point of an op."""
        return self._site(self.outputs[seq][0].site)

    def scalars(self, seq: int) -> dict[str, Any]:
        """The non-tensor arguments of an op by name."""
        return details(self.site(seq).scalars)

    def output(self, seq: int, out: int = 0) -> OpRow:
        """One output of an op; its first where that output was not recorded."""
        rows = self.outputs[seq]
        return next((row for row in rows if row.out == out), rows[0])

    def bad_output(self, seq: int) -> OpRow | None:
        """The first output of an op that is not finite."""
        return self._bad_outputs.get(seq)

    def is_cut(self, seq: int) -> bool:
        """Whether the op read tensors but the trace no longer says which: its edges were dropped."""
        site = self.site(seq)
        return bool(site.in_dtypes) and site.op not in SINK_NODES and not self.inputs[seq]

    def sinks(self) -> list[int]:
        """Non-finite values that matter, the most important first."""
        found = [seq for seq in self._bad_outputs if self.site(seq).op in SINK_NODES]
        return sorted(found, key=lambda seq: (_IMPORTANCE[Node(self.site(seq).op)], seq))

    def edge_is_bad(self, edge: EdgeRow) -> bool:
        """Whether the operand that an edge stands for held a non-finite value."""
        if edge.partial and edge.min is not None:
            return not is_finite(edge.min, edge.max)
        return self.state_is_bad(edge.from_seq, edge.from_out)

    def state_is_bad(self, seq: int, out: int) -> bool:
        """Whether what an op left in memory is non-finite; an op that wrote only a part leaves the rest as it was."""
        if not _row_is_finite(self.output(seq, out)):
            return True
        if self.site(seq).op.partition(".")[0] in COLLECTIVE_LIBRARIES and self.bad_output(seq) is not None:
            return True  # what came from each rank is an output of its own, though all may lie in one memory
        return any(not _row_is_finite(self.output(edge.from_seq, edge.from_out)) for edge in self._left_in_place(seq))

    def _left_in_place(self, seq: int) -> Iterator[EdgeRow]:
        """Yields the values that an op overwrote only in part, and those that their writers had, newest first."""
        seen = {seq}
        while (before := self._overwritten(seq)) is not None and before.partial and before.from_seq not in seen:
            yield before
            seq = before.from_seq
            seen.add(seq)

    def bad_writer(self, edge: EdgeRow) -> int:
        """The op that made the bad value an edge carries: the last writer, or one before it that it left in place."""
        seq, seen = edge.from_seq, {edge.from_seq}
        while self.bad_output(seq) is None:
            before = self._overwritten(seq)
            if before is None or before.from_seq in seen:
                break
            seq = before.from_seq
            seen.add(seq)
        return seq

    def _overwritten(self, seq: int) -> EdgeRow | None:
        return next((edge for edge in self.inputs[seq] if edge.in_place), None)

    def bad_inputs(self, seq: int) -> list[EdgeRow]:
        """Operands of an op that were non-finite, except those whose old values it only overwrote."""
        if seq not in self._bad_inputs:
            self._bad_inputs[seq] = self._look_at_inputs(seq)
        return self._bad_inputs[seq]

    def _look_at_inputs(self, seq: int) -> list[EdgeRow]:
        operands = self.inputs[seq]
        if self.site(seq).op in _OVERWRITES:
            operands = [edge for edge in operands if not edge.in_place]
        bad = [edge for edge in operands if self.edge_is_bad(edge)]
        if op_name(self.site(seq).op) in _FINITE_AT_MINUS_INFINITY and self.bad_output(seq) is not None:
            return [edge for edge in bad if not self._holds_minus_infinity_alone(edge)]
        return bad

    def _holds_minus_infinity_alone(self, edge: EdgeRow) -> bool:
        seen = edge if edge.partial and edge.min is not None else self.output(edge.from_seq, edge.from_out)
        return seen.min == -math.inf and seen.max is not None and seen.max < math.inf


def is_finite(low: float | None, high: float | None) -> bool:
    """Whether a NaN-propagating min and max say that all elements are finite; unmeasured counts as finite."""
    return (low is None or math.isfinite(low)) and (high is None or math.isfinite(high))


def _row_is_finite(row: OpRow) -> bool:
    return is_finite(row.min, row.max)


def has_nan(row: OpRow) -> bool:
    """Whether an output holds a NaN."""
    return row.min is not None and math.isnan(row.min)


def op_name(op: str) -> str:
    """``div`` for ``aten.div.Tensor``, ``addcdiv`` for ``aten.addcdiv_.default`` and for its ``_foreach_`` kin."""
    name = (op.split(".")[1] if "." in op else op).rstrip("_")
    return name.removeprefix("_foreach_")
