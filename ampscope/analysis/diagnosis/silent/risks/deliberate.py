"""Whether a large value is meant to be large, or cannot do harm: a constant, a mask, what a bounded function reads."""

from __future__ import annotations

from ampscope.analysis.diagnosis.silent.risks.warning import magnitude
from ampscope.analysis.origin.step_graph import StepGraph
from ampscope.provenance import op_name
from ampscope.trace.schema import EdgeRow, Node

#: A value is an operand's where it is at most this many times as large.
_THE_SAME = 1.1
#: Ops back that a value is followed.
_REACH = 32
#: Functions that have a limit at an infinity, and are as good as there long before float16 ends.
_SATURATES = frozenset(
    {"tanh", "sigmoid", "erf", "hardtanh", "hardsigmoid", "relu6", "atan", "clamp", "clamp_min", "clamp_max"}
)


def is_meant(graph: StepGraph, seq: int) -> bool:
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


def cannot_harm(graph: StepGraph, seq: int) -> bool:
    """Whether all that reads a result has a limit where it would overflow."""
    readers = [op_name(graph.site(edge.seq).op) for edge in graph.readers[seq]]
    return bool(readers) and all(name in _SATURATES for name in readers)


def _is_given(graph: StepGraph, seq: int, size: float) -> bool:
    site = graph.site(seq)
    if site.op in (Node.INPUT, Node.BUFFER, Node.CARRIED):
        return True
    constants = [abs(value) for value in graph.scalars(seq).values() if isinstance(value, (int, float))]
    is_source = not site.in_dtypes or any(value * _THE_SAME >= size for value in constants)
    return is_source and site.op != Node.PARAMETER


def _of_edge(graph: StepGraph, edge: EdgeRow) -> float:
    if edge.partial and edge.min is not None and edge.max is not None:
        return max(abs(edge.min), abs(edge.max))
    return magnitude(graph.producer(edge))
