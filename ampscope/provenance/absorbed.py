"""Finds overflows that reach no sink because a division turned them into zeros."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ampscope.provenance.graph import Graph, has_nan, is_finite, op_name
from ampscope.provenance.walk import Origin, is_deliberate, path_along
from ampscope.trace.schema import ENTRY_NODES, EdgeRow, Node, Phase, SiteRow

#: Ops after which an infinity is gone and has taken information with it: 1 / inf is 0, whatever was meant.
_DIVIDES = ("rsqrt", "reciprocal", "div")
#: Ops that divide by the root of a running variance, their last operand, except in training.
_BY_VARIANCE = frozenset(
    {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit_no_training"}
)
#: Ops whose result can exceed the range of its dtype although the operands were finite.
_GROWS = ("mul", "pow", "square", "exp", "mm", "matmul", "linear", "conv", "sum", "add", "cumsum", "norm", "mean")
#: Ops that leave the range so steeply that the reciprocal of what they left is as good as zero.
_EXPONENTIALS = frozenset({"exp", "exp2", "expm1", "cosh", "sinh"})


def absorbed(graph: Graph, among: Iterable[int] | None = None) -> list[Origin]:
    """Overflows that no sink shows because a division turned them into zeros.

    An overflow that a saturating function receives (tanh, sigmoid, softmax, clamp) gives the right result and is not
    one of these; nor is an exponential whose reciprocal is taken: 1 / (1 + exp(x)) is zero there, as it should be.

    Args:
        graph: The step.
        among: The ops that are looked at; all by default.
    """
    found = []
    for seq in sorted(graph.outputs if among is None else among):
        row = graph.bad_output(seq)
        if row is None or has_nan(row) or graph.bad_inputs(seq) or not _can_overflow(graph.site(seq)):
            continue
        path = _to_division(graph, seq)
        if path and not is_deliberate(graph, seq):
            found.append(Origin(seq, row.out, path, path[-1]))
    return found


def reaches_loss(graph: Graph, seq: int) -> bool:
    """Whether a loss was computed from what an op gave."""
    return reaches(graph, seq, (Node.LOSS,))


def reaches(graph: Graph, seq: int, sinks: Collection[Node]) -> bool:
    """Whether one of some kinds of sinks was computed from what an op gave."""
    seen, queue = {seq}, [seq]
    while queue:
        for edge in graph.readers[queue.pop()]:
            if graph.site(edge.seq).op in sinks:
                return True
            if edge.seq not in seen:
                seen.add(edge.seq)
                queue.append(edge.seq)
    return False


def _can_overflow(site: SiteRow) -> bool:
    name = op_name(site.op)
    forward = site.phase in (Phase.FORWARD, Phase.LOSS)
    if site.op == Node.CARRIED:
        return True  # an infinity that an earlier step left
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
            if _hands_on(graph, edge.seq):
                queue.append(edge.seq)
            elif _swallows(graph, edge) and not _saturates(graph, seq, edge.seq):
                return path_along(towards, edge.seq)[::-1]
    return ()


def _hands_on(graph: Graph, seq: int) -> bool:
    """Whether what an op gave is not finite; the running statistics that it was given are no result of it."""
    if op_name(graph.site(seq).op) not in _BY_VARIANCE:
        return graph.bad_output(seq) is not None
    result = graph.output(seq)
    return not is_finite(result.min, result.max)


def _swallows(graph: Graph, edge: EdgeRow) -> bool:
    name = op_name(graph.site(edge.seq).op)
    if name == "div":
        return edge.arg == 1
    if name in _BY_VARIANCE:
        last = len(graph.site(edge.seq).in_dtypes) - 1
        return edge.arg == last and graph.scalars(edge.seq).get("training") is not True
    if name == "pow":
        return any(isinstance(v, (int, float)) and v < 0 for v in graph.scalars(edge.seq).values())
    return any(word in name for word in _DIVIDES)


def _saturates(graph: Graph, seq: int, division: int) -> bool:
    """Whether an overflow is an exponential's, and the division takes its reciprocal: a constant over it."""
    return op_name(graph.site(seq).op) in _EXPONENTIALS and op_name(graph.site(division).op) != "div"
