"""Walks back from what matters to the ops at which its non-finite values were born."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.provenance.graph import Graph, has_nan, op_name
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, Node, Phase, SiteRow
from ampscope.trace.schema.tables import details

#: Ops that take a 0 of a mask to the -inf which a softmax reads as "not this one".
_LOGARITHMS = frozenset({"log", "log2", "log10"})

#: Ops each of whose results is a sum over many elements of an operand.
_SUMS = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "_embedding_bag", "embedding_bag"),
        *("sum", "mean", "cumsum", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm"),
        *("native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm"),
    }
)


@dataclass(frozen=True, slots=True)
class Origin:
    """The op at which a non-finite value that mattered was born, and its way to a sink."""

    seq: int
    out: int
    path: tuple[int, ...]  #: sequence numbers from the origin to the sink
    sink: int  #: sequence number of the sink

    @property
    def key(self) -> tuple[int, int]:
        """The identity of the origin: two with the same key are one."""
        return (self.seq, self.out)


def origins(graph: Graph) -> list[Origin]:
    """The ops at which the non-finite values in the step's sinks were born.

    Returns:
        One origin per op, the one that matters most first: by importance of the sink, then by execution order; those
        whose operands the trace has lost come last.
    """
    found: dict[tuple[int, int], Origin] = {}
    known: set[int] = set()
    for sink in graph.sinks():
        for origin in sorted(_walk(graph, sink, known), key=lambda origin: origin.seq):
            found.setdefault(origin.key, origin)
    kept = _without_recomputation(graph, list(found.values()))
    return sorted(kept, key=lambda origin: graph.is_cut(origin.seq))


def _walk(graph: Graph, sink: int, known: set[int]) -> list[Origin]:
    """Depth-first from ``sink`` back along non-finite values, but for ops of which all origins are known.

    A NaN loss reaches every gradient: without this, each would be followed back to the same origin. Where a mask's
    origin is moved, which depends on the way to the sink, each is.
    """
    towards: dict[int, int] = {sink: -1}
    stack, born = [sink], []
    while stack:
        seq = stack.pop()
        bad = graph.bad_inputs(seq)
        if not bad and seq != sink:
            row = graph.bad_output(seq)
            born.append(Origin(seq, row.out if row else 0, path_along(towards, seq), sink))
        for edge in bad:
            source = graph.bad_writer(edge)
            if source not in towards and source not in known:
                towards[source] = seq
                stack.append(source)
    moved = [_past_mask(graph, origin, towards) for origin in born]
    if moved == born:
        known.update(towards)
    return [origin for origin in moved if origin is not None]


def path_along(towards: dict[int, int], seq: int) -> tuple[int, ...]:
    """The numbers from ``seq`` to the one that ``towards`` says leads nowhere (-1)."""
    path = [seq]
    while towards[path[-1]] != -1:
        path.append(towards[path[-1]])
    return tuple(path)


def is_deliberate(graph: Graph, seq: int) -> bool:
    """Whether an op wrote infinities on purpose: a fill with an infinite scalar, a mask that came as input.

    Only -inf without NaN counts for masks from outside: that is what additive masks are made of. A mask is added to
    what it masks; what is summed over, as by a matrix product, is data.
    """
    site, row = graph.site(seq), graph.bad_output(seq)
    if row is None:
        return False
    if not has_nan(row) and names_infinity(site):
        return True
    from_outside = site.op in ENTRY_NODES and site.op != Node.PARAMETER
    return from_outside and only_minus_infinity(graph, seq) and not _is_summed_over(graph, seq)


def _is_summed_over(graph: Graph, seq: int) -> bool:
    """Whether -inf stays -inf until an op sums over it, and makes every sum that holds one non-finite."""
    seen, front = {seq}, [seq]
    while front:
        for edge in graph.readers[front.pop()]:
            if edge.seq in seen or edge not in graph.bad_inputs(edge.seq) or graph.bad_output(edge.seq) is None:
                continue
            seen.add(edge.seq)
            if op_name(graph.site(edge.seq).op) in _SUMS:
                return True
            if only_minus_infinity(graph, edge.seq):
                front.append(edge.seq)
    return False


def names_infinity(site: SiteRow) -> bool:
    """Whether an argument that is no tensor is infinite."""
    return any("inf" in str(value) for value in details(site.scalars).values())


def only_minus_infinity(graph: Graph, seq: int) -> bool:
    """Whether what is not finite in an op's result is -inf and nothing else."""
    row = graph.bad_output(seq)
    return row is not None and row.min == -math.inf and row.max is not None and row.max < math.inf


def _is_log_of_mask(graph: Graph, seq: int) -> bool:
    """Whether an op took the logarithm of zeros that came from outside: 1 for keep, 0 for drop."""
    if op_name(graph.site(seq).op) not in _LOGARITHMS or not only_minus_infinity(graph, seq):
        return False
    while graph.inputs[seq]:
        before = graph.inputs[seq][0].from_seq
        site = graph.site(before)
        if site.op in ENTRY_NODES:
            return site.op != Node.PARAMETER
        if not site.cast:
            return False
        seq = before
    return False


def _past_mask(graph: Graph, origin: Origin, towards: dict[int, int]) -> Origin | None:
    """Moves an origin from a deliberate infinity to the op that made a NaN (or another infinity) of it.

    None where the mask only met a NaN that was born elsewhere.
    """
    log_of_mask = _is_log_of_mask(graph, origin.seq)
    if not log_of_mask and not is_deliberate(graph, origin.seq):
        return origin
    made = _made_nan(graph, origin.seq, towards)
    if made is not None:
        if log_of_mask and "softmax" not in op_name(graph.site(made).op):
            return origin
        row = graph.bad_output(made)
        return Origin(made, row.out if row else 0, path_along(towards, made), origin.sink)
    return None if any(_met_nan(graph, seq) for seq in origin.path[1:]) else origin


def _made_nan(graph: Graph, mask: int, towards: dict[int, int]) -> int | None:
    """The first op on the way to a sink that made a NaN of what a mask's infinities became."""
    waiting, seen = [mask], {mask}
    while waiting:
        seq = heapq.heappop(waiting)
        row = graph.bad_output(seq)
        if row is None or graph.site(seq).op in SINK_NODES:
            continue
        if has_nan(row):
            if not _met_nan(graph, seq):
                return seq
            continue
        readers = {edge.seq for edge in graph.readers[seq] if edge.seq in towards and edge.seq not in seen}
        seen |= readers
        for reader in readers:
            heapq.heappush(waiting, reader)
    return None


def _met_nan(graph: Graph, seq: int) -> bool:
    """Whether an op was given a NaN."""
    rows = (graph.bad_output(graph.bad_writer(edge)) for edge in graph.bad_inputs(seq))
    return any(row is not None and has_nan(row) for row in rows)


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
