"""A large value may say nothing of an overflow to come: it is meant, cannot do harm, or carries the loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ampscope.provenance.graph import Graph, op_name
from ampscope.trace.schema import ENTRY_NODES, EdgeRow, Node, OpRow, Phase

#: A value is an operand's where it is at most this many times as large.
_THE_SAME = 1.1
#: Ops back that a value is followed.
_REACH = 32
#: Functions that have a limit at an infinity, and are as good as there long before float16 ends.
_SATURATES = frozenset(
    {"tanh", "sigmoid", "erf", "hardtanh", "hardsigmoid", "relu6", "atan", "clamp", "clamp_min", "clamp_max"}
)
#: Ops whose results stay within fixed bounds, whatever they are given.
_BOUNDED = frozenset(
    {
        *("sigmoid", "tanh", "softmax", "hardtanh", "hardsigmoid", "relu6", "erf", "atan", "sin", "cos"),
        *("rand", "rand_like", "bernoulli", "sign", "cosine_similarity", "nan_to_num"),
    }
)
#: Those that do where they are given both bounds.
_CLAMPS = frozenset({"clamp", "clip"})
#: Ops that make a tensor of constants of the code.
_CONSTANT = frozenset({"full", "full_like", "fill", "zeros", "zeros_like", "ones", "ones_like", "arange", "linspace"})


def is_bounded(op: str, scalars: Callable[[], Mapping[str, Any]]) -> bool:
    """Whether what an op gives cannot grow, whatever it is given.

    Args:
        op: Its overload.
        scalars: Tells its arguments that are no tensors, by name.
    """
    name = op_name(op).strip("_")
    if name in _CLAMPS:
        given = scalars()
        return all(isinstance(given.get(end), (int, float)) for end in ("min", "max"))
    return name in _BOUNDED | _CONSTANT


def is_meant(graph: Graph, seq: int) -> bool:
    """Whether the largest magnitude that an op gave came from a constant of the code or from outside the step.

    It is followed back through the operands that are as large.
    """
    size, seen = max(map(magnitude, graph.outputs[seq])), {seq}
    for _ in range(_REACH):
        if _is_given(graph, seq, size):
            return True
        operands = [edge for edge in graph.inputs[seq] if _of_edge(graph, edge) * _THE_SAME >= size]
        before = next((edge.from_seq for edge in operands if edge.from_seq not in seen), None)
        if before is None:
            return False
        seq = before
        seen.add(seq)
    return False


def cannot_harm(graph: Graph, seq: int) -> bool:
    """Whether all that reads a result has a limit where it would overflow."""
    readers = [op_name(graph.site(edge.seq).op) for edge in graph.readers[seq]]
    return bool(readers) and all(name in _SATURATES for name in readers)


def magnitude(row: OpRow) -> float:
    """The largest finite magnitude of an output; 0 where none was measured."""
    ends = (row.min, row.max)
    return max((abs(end) for end in ends if end is not None and math.isfinite(end)), default=0.0)


def _is_given(graph: Graph, seq: int, size: float) -> bool:
    site = graph.site(seq)
    if site.op in (Node.INPUT, Node.BUFFER, Node.CARRIED):
        return True
    constants = [abs(value) for value in graph.scalars(seq).values() if isinstance(value, (int, float))]
    is_source = not site.in_dtypes or any(value * _THE_SAME >= size for value in constants)
    return is_source and site.op != Node.PARAMETER


def _of_edge(graph: Graph, edge: EdgeRow) -> float:
    if edge.partial and edge.min is not None and edge.max is not None:
        return max(abs(edge.min), abs(edge.max))
    return magnitude(graph.output(edge.from_seq, edge.from_out))


class Scaled(NamedTuple):
    """The ops of one step that carry the loss scale, by sequence number."""

    scale: frozenset[int] = frozenset()  #: where the loss scale itself entered it
    carrying: frozenset[int] = frozenset()  #: what was computed from that, backward left out: all of it carries it


def scaled(graph: Graph, scale: float | None) -> Scaled:
    """Finds the ops outside of backward whose results carry the loss scale.

    A scale of 1 makes nothing larger, and other numbers are 1 as well.

    Args:
        graph: The step.
        scale: The loss scale that was in use; None without one.
    """
    if scale is None or scale == 1.0:
        return Scaled()
    found = frozenset(seq for seq in graph.outputs if _is_scale(graph, seq, scale))
    carrying: set[int] = set()
    ahead = list(found)
    while ahead:
        readers = {edge.seq for edge in graph.readers[ahead.pop()] if _is_of_the_loss(graph, edge.seq)}
        ahead += readers - carrying
        carrying |= readers
    return Scaled(found, frozenset(carrying))


def _is_of_the_loss(graph: Graph, seq: int) -> bool:
    site = graph.site(seq)
    return site.phase == Phase.LOSS or site.op == Node.LOSS


def _is_scale(graph: Graph, seq: int, scale: float) -> bool:
    """Whether a single number that entered the step in the loss's code is the scale."""
    site, row = graph.site(seq), graph.outputs[seq][0]
    return site.op in ENTRY_NODES and site.phase == Phase.LOSS and row.numel == 1 and row.min == row.max == scale
