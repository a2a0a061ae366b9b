"""Whether an optimizer divides by zeros that it was given, rather than by what its dtype rounded to zero."""

from __future__ import annotations

from ampscope.analysis.origin.op_facts import Executed
from ampscope.analysis.origin.parameter_lists import operands_of
from ampscope.analysis.origin.step_graph import StepGraph
from ampscope.trace.schema import ENTRY_NODES, EdgeRow, Phase

#: Ops that give zeros where one of their operands holds nothing else; others need all of them to.
_PRODUCTS = frozenset({"mul", "mm", "bmm", "mv", "dot"})
_QUOTIENTS = frozenset({"div", "true_divide"})
_FILLS = frozenset({"zeros_like", "new_zeros", "zeros", "zero", "full_like", "new_full", "full", "fill"})


def divides_by_given_zeros(op: Executed) -> bool:
    """Whether the divisor of an op was zero throughout, for its own operands were, back to the optimizer's first."""
    divisors = {edge.arg for edge in op.divisors}
    wanted = [edge for edge in operands_of(op.graph, op.seq, op.result.out) if edge.arg in divisors]
    return bool(wanted) and all(_are_given_zeros(op.graph, edge, set()) for edge in wanted)


def _are_given_zeros(graph: StepGraph, edge: EdgeRow, seen: set[tuple[int, int]]) -> bool:
    row = graph.producer(edge)
    if not (edge.min == edge.max == 0.0 if edge.partial else row.min == row.max == 0.0):
        return False
    site, at = graph.site(edge.from_seq), (edge.from_seq, edge.from_out)
    if site.op in ENTRY_NODES or site.phase != Phase.OPTIMIZER or at in seen:
        return True
    seen.add(at)
    op = Executed(graph, edge.from_seq)
    if op.name in _FILLS:
        return True
    given = sorted(operands_of(graph, op.seq, edge.from_out), key=lambda each: each.arg)
    zeros = (_are_given_zeros(graph, each, seen) for each in (given[:1] if op.name in _QUOTIENTS else given))
    return any(zeros) if op.name in _PRODUCTS else bool(given) and all(zeros)
