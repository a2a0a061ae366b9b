"""Which parameter an op of an optimizer worked for, through ops that take whole lists of tensors at once."""

from __future__ import annotations

from collections.abc import Iterator

from ampscope.analysis.origin.step_graph import StepGraph
from ampscope.trace.schema import EdgeRow, Node, Phase, SiteRow

#: Nodes that stand for what an optimizer left of one parameter.
_LEFT = (Node.WEIGHT_AFTER, Node.STATE_AFTER)


def operands_of(graph: StepGraph, seq: int, out: int) -> list[EdgeRow]:
    """The operands that one result of an op was computed from: of an op over lists, those in its place and in none."""
    return [edge for edge in graph.inputs[seq] if _goes_into(graph, edge, out)]


def owner_of(graph: StepGraph, seq: int, out: int) -> str | None:
    """The one parameter that a bad result of an optimizer's op went into; None where it went into several, or none."""
    names: set[str] = set()
    waiting, seen = [(seq, out)], {(seq, out)}
    while waiting:
        written, place = waiting.pop()
        for edge in graph.readers[written]:
            if edge.from_out != place:
                continue
            site = graph.site(edge.seq)
            if site.op in _LEFT:
                names.add(parameter_of(site))
            reached = {(edge.seq, each) for each in _results_of(graph, edge)} - seen
            seen |= reached
            waiting += reached
    return names.pop() if len(names) == 1 else None


def module_of_update(graph: StepGraph, seq: int) -> str:
    """The module of the one parameter that an optimizer's op worked for; empty for several.

    That is the one that its bad result went into, unless it was computed from the gradients of several.
    """
    row = graph.bad_output(seq)
    name = owner_of(graph, seq, row.out) if row is not None else None
    if row is None or not name or len(_gradients_of(graph, seq, row.out)) > 1:
        return ""
    return name.rpartition(".")[0]


def _gradients_of(graph: StepGraph, seq: int, out: int) -> set[tuple[int, int]]:
    """The gradients that a result of an optimizer's op was computed from, where the trace holds their backward."""
    found: set[tuple[int, int]] = set()
    waiting, seen = [(seq, out)], {(seq, out)}
    while waiting:
        for edge in operands_of(graph, *waiting.pop()):
            source, phase = (edge.from_seq, edge.from_out), graph.site(edge.from_seq).phase
            if phase == Phase.BACKWARD:
                found.add(source)
            elif phase == Phase.OPTIMIZER and source not in seen:
                seen.add(source)
                waiting.append(source)
    return found


def parameter_of(site: SiteRow) -> str:
    """The qualified name of the parameter that a sink was left of: of a tensor of its state, ``exp_avg of NAME``."""
    return site.name.rpartition(" of ")[2] if site.op == Node.STATE_AFTER else site.name


def _results_of(graph: StepGraph, edge: EdgeRow) -> Iterator[int]:
    return (row.out for row in graph.outputs[edge.seq] if _goes_into(graph, edge, row.out))


def _goes_into(graph: StepGraph, edge: EdgeRow, out: int) -> bool:
    """Whether an operand takes part in a result: a list's does in the one with its place, any other in all."""
    site = graph.site(edge.seq)
    count = len(site.out_dtypes)
    if "_foreach_" not in site.op or not count:
        return True
    in_lists = len(site.in_dtypes) // count * count
    return edge.arg >= in_lists or edge.arg % count == out
