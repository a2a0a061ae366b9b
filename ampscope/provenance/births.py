"""Finds the non-finite values of a step that harm nothing, each with the reason why it is left alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from ampscope.provenance.absorbed import absorbed
from ampscope.provenance.graph import Graph, has_nan, op_name
from ampscope.provenance.walk import is_deliberate, only_minus_infinity
from ampscope.trace.schema import ENTRY_NODES, SINK_NODES, Phase

#: Ops that choose between values: what they leave out is gone, whatever it was.
_SELECTS = frozenset({"where", "masked_fill", "nan_to_num", "clamp", "clamp_min", "clamp_max", "threshold_backward"})
#: Ops that read -inf as "not this one".
_READS_MASKS = frozenset({"_softmax", "_log_softmax", "exp", "logsumexp", "max", "amax", "topk"})

#: Functions that have a finite limit at an infinity, and are as good as there long before any dtype ends.
_SATURATES = frozenset(
    {"tanh", "sigmoid", "erf", "hardtanh", "hardsigmoid", "relu6", "atan", "clamp", "clamp_min", "clamp_max"}
)


class Harmless(StrEnum):
    """The reasons why a non-finite value is left alone."""

    MASK = "mask"  #: -inf (or inf) written on purpose, as in a mask, and gone before anything that matters
    SATURATED = "saturated"  #: an infinity that a bounded function took to the limit that any large number has there
    MASKED = "masked"  #: born where nobody looks: masked, or replaced, before anything that matters
    UNUSED = "unused"  #: reaches no loss, gradient, weight or buffer: a metric, a log


class Birth(NamedTuple):
    """A non-finite value born in a step, and why it is harmless."""

    seq: int
    why: Harmless


def harmless_births(graph: Graph, among: Iterable[int] | None = None) -> Iterator[Birth]:
    """The ops that made a non-finite value of finite operands without any sink being the worse for it, in order.

    Args:
        graph: The step.
        among: The ops that are looked at; all by default.
    """
    asked = sorted(graph.outputs if among is None else among)
    born = [seq for seq in asked if _is_born(graph, seq)]
    if born:
        harmful = _told_by_a_sink(graph).union(origin.seq for origin in absorbed(graph, born))
        yield from (Birth(seq, _why(graph, seq)) for seq in born if seq not in harmful)


def _told_by_a_sink(graph: Graph) -> set[int]:
    """The ops whose non-finite values reach a sink: walked back to once, and not from each op on."""
    found = set(graph.sinks())
    queue = list(found)
    while queue:
        for edge in graph.inputs[queue.pop()]:
            before = edge.from_seq
            if before not in found and graph.bad_output(before) is not None and graph.edge_is_bad(edge):
                found.add(before)
                queue.append(before)
    return found


def _is_born(graph: Graph, seq: int) -> bool:
    if graph.bad_output(seq) is None or graph.is_cut(seq) or (site := graph.site(seq)).op in SINK_NODES:
        return False
    return is_deliberate(graph, seq) or (site.op not in ENTRY_NODES and not graph.bad_inputs(seq))


def _why(graph: Graph, seq: int) -> Harmless:
    """Returns the reason why a non-finite value that reaches no sink does no harm."""
    seen, queue = {seq}, [seq]
    swallowed: set[str] = set()  # names of the ops that made something finite of it
    while queue:
        here = queue.pop(0)
        for edge in graph.readers[here]:
            if edge.seq in seen or not graph.edge_is_bad(edge):
                continue
            seen.add(edge.seq)
            if graph.bad_output(edge.seq) is not None:
                queue.append(edge.seq)
            elif _passes_on(graph, edge.seq):
                swallowed.add(op_name(graph.site(edge.seq).op))
    if is_deliberate(graph, seq) or (only_minus_infinity(graph, seq) and swallowed & _READS_MASKS):
        return Harmless.MASK
    born = graph.bad_output(seq)
    if swallowed and swallowed <= _SATURATES and born is not None and not has_nan(born):
        return Harmless.SATURATED
    return Harmless.MASKED if swallowed or graph.site(seq).phase == Phase.BACKWARD else Harmless.UNUSED


def _passes_on(graph: Graph, seq: int) -> bool:
    """Whether a finite result that an op made of a non-finite operand is read by anything."""
    return bool(graph.readers[seq]) or op_name(graph.site(seq).op) in _SELECTS
