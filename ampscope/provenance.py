"""From the op records of a traced step and their dataflow edges to the origins that matter. Pure: no torch, no files.

The first NaN is often not the culprit. The walk starts at what matters (the loss, gradients, weights, buffers) and
follows non-finite values back to the ops whose operands were all finite and whose result was not.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, EdgeRow, Node, OpRow, Phase, SiteRow

#: Sinks in the order in which their origins are told.
_IMPORTANCE = {Node.LOSS: 0, Node.WEIGHT_AFTER: 1, Node.GRADIENT: 2, Node.BUFFER_AFTER: 3}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a non-finite value that mattered was born."""

    seq: int
    out: int
    path: tuple[int, ...]  #: sequence numbers from the origin to the sink
    sink: int  #: sequence number of the sink

    @property
    def key(self) -> tuple[int, int]:
        """What makes two origins one."""
        return (self.seq, self.out)


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
        for row in ops:
            self.outputs[row.seq].append(row)
        for edge in edges:
            if edge.seq in self.outputs and edge.from_seq in self.outputs:  # a disk budget may have cut rows away
                self.inputs[edge.seq].append(edge)
                self.readers[edge.from_seq].append(edge)
        self._site = site

    def site(self, seq: int) -> SiteRow:
        """The program point of an op."""
        return self._site(self.outputs[seq][0].site)

    def output(self, seq: int, out: int = 0) -> OpRow:
        """One output of an op; its first where that output was not recorded."""
        rows = self.outputs[seq]
        return next((row for row in rows if row.out == out), rows[0])

    def bad_output(self, seq: int) -> OpRow | None:
        """The first output of an op that is not finite."""
        return next((row for row in self.outputs[seq] if not is_finite(row.min, row.max)), None)

    def sinks(self) -> list[int]:
        """Non-finite values that matter, the most important first."""
        found = [seq for seq in self.outputs if self.site(seq).op in SINK_NODES and self.bad_output(seq) is not None]
        return sorted(found, key=lambda seq: (_IMPORTANCE[Node(self.site(seq).op)], seq))

    def edge_is_bad(self, edge: EdgeRow) -> bool:
        """Whether the operand that an edge stands for held a non-finite value."""
        if edge.partial and edge.min is not None:
            return not is_finite(edge.min, edge.max)
        return self.state_is_bad(edge.from_seq, edge.from_out)

    def state_is_bad(self, seq: int, out: int) -> bool:
        """Whether what an op left in memory is non-finite; an op that wrote only a part leaves the rest as it was."""
        row = self.output(seq, out)
        if not is_finite(row.min, row.max):
            return True
        before = self._overwritten(seq)
        return before is not None and before.partial and self.state_is_bad(before.from_seq, before.from_out)

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
        operands = self.inputs[seq]
        if self.site(seq).op in _OVERWRITES:
            operands = [edge for edge in operands if not edge.in_place]
        return [edge for edge in operands if self.edge_is_bad(edge)]


#: In-place ops that do not read what they overwrite.
_OVERWRITES = frozenset({"aten.copy_.default", "aten.zero_.default", "aten.fill_.Scalar", "aten.fill_.Tensor"})


def is_finite(low: float | None, high: float | None) -> bool:
    """Whether a NaN-propagating min and max say that all elements are finite; unmeasured counts as finite."""
    return (low is None or math.isfinite(low)) and (high is None or math.isfinite(high))


def origins(graph: Graph) -> list[Origin]:
    """The ops at which the non-finite values in the step's sinks were born.

    Returns:
        One origin per op, the one that matters most first: by importance of the sink, then by execution order.
    """
    found: dict[tuple[int, int], Origin] = {}
    for sink in graph.sinks():
        for origin in sorted(_walk(graph, sink), key=lambda origin: origin.seq):
            found.setdefault(origin.key, origin)
    return _without_recomputation(graph, list(found.values()))


def _walk(graph: Graph, sink: int) -> list[Origin]:
    """Depth-first from ``sink`` back along non-finite values."""
    towards: dict[int, int] = {sink: -1}
    stack, born = [sink], []
    while stack:
        seq = stack.pop()
        bad = graph.bad_inputs(seq)
        if not bad and seq != sink:
            row = graph.bad_output(seq)
            born.append(Origin(seq, row.out if row else 0, _path(towards, seq), sink))
        for edge in bad:
            source = graph.bad_writer(edge)
            if source not in towards:
                towards[source] = seq
                stack.append(source)
    return [_past_mask(graph, origin) for origin in born]


def _path(towards: dict[int, int], seq: int) -> tuple[int, ...]:
    path = [seq]
    while towards[path[-1]] != -1:
        path.append(towards[path[-1]])
    return tuple(path)


def is_deliberate(graph: Graph, seq: int) -> bool:
    """Whether an op wrote infinities on purpose: a fill with an infinite scalar, a mask that came as input.

    Only -inf without NaN counts for masks from outside: that is what additive masks are made of.
    """
    site, row = graph.site(seq), graph.bad_output(seq)
    if row is None:
        return False
    if not has_nan(row) and any("inf" in str(value) for value in json.loads(site.scalars).values()):
        return True
    from_outside = site.op in ENTRY_NODES and site.op != Node.PARAMETER
    return from_outside and row.min == -math.inf and row.max is not None and row.max < math.inf


def _past_mask(graph: Graph, origin: Origin) -> Origin:
    """Moves an origin from a deliberate infinity to the op that made a NaN (or another infinity) of it."""
    if not is_deliberate(graph, origin.seq):
        return origin
    for index, seq in enumerate(origin.path[1:], 1):
        row = graph.bad_output(seq)
        if row is not None and graph.site(seq).op not in SINK_NODES and has_nan(row):
            return Origin(seq, row.out, origin.path[index:], origin.sink)
    return origin


def has_nan(row: OpRow) -> bool:
    """Whether an output holds a NaN."""
    return row.min is not None and math.isnan(row.min)


def _without_recomputation(graph: Graph, found: Sequence[Origin]) -> list[Origin]:
    """Replaces origins in recomputed code by the first execution of the same line, and drops duplicates."""
    kept: dict[tuple[int, int], Origin] = {}
    for origin in found:
        twin = _first_execution(graph, origin)
        kept.setdefault(twin.key, twin)
    return list(kept.values())


def _first_execution(graph: Graph, origin: Origin) -> Origin:
    site = graph.site(origin.seq)
    if site.phase != Phase.RECOMPUTE:
        return origin
    for seq in sorted(graph.outputs):
        other = graph.site(seq)
        same = (other.op, other.module, other.file, other.line) == (site.op, site.module, site.file, site.line)
        if same and other.phase != Phase.RECOMPUTE and graph.bad_output(seq) is not None:
            return Origin(seq, origin.out, (seq, *origin.path[1:]), origin.sink)
    return origin


#: Ops after which an infinity is gone and has taken information with it: 1 / inf is 0, whatever was meant.
_DIVIDES = ("rsqrt", "reciprocal", "div")
#: Ops whose result can exceed the range of its dtype although the operands were finite.
_GROWS = ("mul", "pow", "square", "exp", "mm", "matmul", "linear", "conv", "sum", "add", "cumsum", "norm", "mean")


def absorbed(graph: Graph) -> list[Origin]:
    """Overflows that no sink shows because a division turned them into zeros.

    An overflow that a saturating function receives (tanh, sigmoid, softmax, clamp) gives the right result and is not
    one of these.
    """
    found = []
    for seq in sorted(graph.outputs):
        row = graph.bad_output(seq)
        if row is None or has_nan(row) or graph.bad_inputs(seq) or not _can_overflow(graph.site(seq)):
            continue
        path = _to_division(graph, seq)
        if path and not is_deliberate(graph, seq):
            found.append(Origin(seq, row.out, path, path[-1]))
    return found


def _can_overflow(site: SiteRow) -> bool:
    name = site.op.split(".")[1] if "." in site.op else site.op
    forward = site.phase in (Phase.FORWARD, Phase.LOSS)
    return forward and site.op not in ENTRY_NODES and (any(word in name for word in _GROWS) or bool(site.cast))


def _to_division(graph: Graph, seq: int) -> tuple[int, ...]:
    """The way from an infinity to the division that swallows it; empty when there is none."""
    towards, queue = {seq: -1}, [seq]
    while queue:
        here = queue.pop(0)
        for edge in graph.readers[here]:
            if edge.seq in towards or graph.site(edge.seq).phase == Phase.BACKWARD or not graph.edge_is_bad(edge):
                continue
            towards[edge.seq] = here
            if graph.bad_output(edge.seq) is not None:
                queue.append(edge.seq)
            elif _swallows(graph.site(edge.seq), edge):
                return _path(towards, edge.seq)[::-1]
    return ()


def _swallows(site: SiteRow, edge: EdgeRow) -> bool:
    name = site.op.split(".")[1] if "." in site.op else site.op
    if name.rstrip("_") == "div":
        return edge.arg == 1
    if name.startswith("pow"):
        return any(isinstance(v, (int, float)) and v < 0 for v in json.loads(site.scalars).values())
    return any(word in name for word in _DIVIDES)
