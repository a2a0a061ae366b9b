"""The op at which a step failed, its operands and its neighbours, by the records of a replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ampscope.cures.call_form import CallPlace
from ampscope.provenance import Graph, op_name, origins
from ampscope.trace.dtypes import PARTS
from ampscope.trace.schema import Cast, EdgeRow, OpRow, Phase, SiteRow

#: Ops back, or forth, within which one that belongs to the failed one is looked for.
REACH = 12
_FORWARD = (Phase.FORWARD, Phase.LOSS, Phase.RECOMPUTE)


class FailedOperand(NamedTuple):
    """One operand of the failed op, as the code gave it."""

    dtype: str  #: of complex numbers, that of their parts
    low: float | None
    high: float | None
    smallest: float | None  #: magnitude that is not zero

    @property
    def is_negative(self) -> bool:
        """Whether it holds a number below zero, as far as it was measured."""
        return self.low is not None and self.low < 0


class FailedOp:
    """The op of the forward at which values went wrong, or whose gradient did.

    Args:
        graph: The step's records.
        seq: The op of the forward.
        origin: The op at the origin: the same one, or one of its backward.

    Attributes:
        wide: What the op gave with everything in float32; None where that is not known.
        wide_graph: The records of that.
        is_of_range: The step is well in float32.
        is_converted: The code itself converts to half precision: then what a call is given is to be float32.
    """

    def __init__(self, graph: Graph, seq: int, origin: int) -> None:
        self.graph = graph
        self.seq = seq
        self.origin = origin
        self.wide: OpRow | None = None
        self.wide_graph: Graph | None = None
        self.is_of_range = False
        self.is_converted = False

    @property
    def site(self) -> SiteRow:
        """The program point of the op of the forward."""
        return self.graph.site(self.seq)

    @property
    def name(self) -> str:
        """The name of the op of the forward: ``log``."""
        return op_name(self.site.op)

    @property
    def in_backward(self) -> bool:
        """Whether the forward was finite there, and the gradient was not."""
        return self.origin != self.seq

    @property
    def place(self) -> CallPlace:
        """The user's line that calls it."""
        return self.place_of(self.seq)

    @property
    def is_masked(self) -> bool:
        """Whether a selection takes the place of some of the op's values at once."""
        readers = self.after(self.seq, frozenset({"_to_copy"}))
        return any(self.name_of(each) in ("where", "masked_fill") for each in readers)

    def edge(self, number: int) -> EdgeRow | None:
        """How an operand was read; None where it has none, or that was not recorded."""
        return next((edge for edge in self.graph.inputs[self.seq] if edge.arg == number), None)

    def operand(self, number: int) -> FailedOperand | None:
        """One of its operands; None where the trace does not say what wrote it."""
        edge = self.edge(number)
        dtype = next(iter(self.site.in_dtypes[number : number + 1]), "")
        while edge is not None and self.graph.site(edge.from_seq).cast == Cast.AUTOCAST:
            dtype = next(iter(self.graph.site(edge.from_seq).in_dtypes), dtype)
            edge = next(iter(self.graph.inputs[edge.from_seq]), None)
        if edge is None:
            return None
        row = self.graph.output(edge.from_seq, edge.from_out)
        low, high = (edge.min, edge.max) if edge.partial else (row.min, row.max)
        return FailedOperand(PARTS.get(dtype, dtype), low, high, row.statistics.min_positive)

    def place_of(self, seq: int) -> CallPlace:
        """The user's line that an op belongs to."""
        site = self.graph.site(seq)
        return CallPlace(site.file, site.line)

    def name_of(self, seq: int) -> str:
        """The name of an op: ``log``."""
        return op_name(self.graph.site(seq).op)

    def before(self, seq: int, through: frozenset[str]) -> Iterator[int]:
        """The ops that one depends on, nearest first, through ops of some names only."""
        seen, front = {seq}, [seq]
        for _ in range(REACH):
            found = dict.fromkeys(edge.from_seq for each in front for edge in self.graph.inputs[each])
            found = {each: None for each in found if each not in seen}
            seen.update(found)
            yield from found
            front = [each for each in found if self.name_of(each) in through]

    def after(self, seq: int, through: frozenset[str]) -> Iterator[int]:
        """The ops of the forward that read one, nearest first, through ops of some names only."""
        seen, front = {seq}, [seq]
        for _ in range(REACH):
            found = dict.fromkeys(edge.seq for each in front for edge in self.graph.readers[each])
            found = {each: None for each in found if each not in seen and self.graph.site(each).phase in _FORWARD}
            seen.update(found)
            yield from found
            front = [each for each in found if self.name_of(each) in through]


def failed_op(graph: Graph) -> FailedOp | None:
    """The op at which a step failed; None where nothing non-finite reached what matters, or no call made it."""
    born = origins(graph)
    if not born:
        return None
    origin = born[0].seq
    site = graph.site(origin)
    if site.phase != Phase.BACKWARD:
        return FailedOp(graph, origin, origin) if site.op.startswith("aten.") else None
    made_by = [seq for seq, written in graph.outputs.items() if seq < origin and written[0].site == site.forward_site]
    return FailedOp(graph, made_by[-1], origin) if made_by else None
