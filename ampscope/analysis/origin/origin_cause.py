"""From an origin to its cause: which op to name for it, in which phase, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ampscope.analysis.numerics import rounding
from ampscope.analysis.origin import op_rules
from ampscope.analysis.origin.bounds import cannot_overflow
from ampscope.analysis.origin.op_facts import Executed
from ampscope.analysis.origin.step_graph import StepGraph
from ampscope.provenance import Origin, is_deliberate, op_name
from ampscope.trace.schema import ENTRY_NODES, Node, Phase
from ampscope.trace.vocabulary import Cause

_ENTRIES = {Node.INPUT: Cause.BAD_INPUT, Node.PARAMETER: Cause.BAD_WEIGHT, Node.BUFFER: Cause.BAD_BUFFER}
#: Autograd nodes whose derivative is that of a square root.
_SQUARE_ROOTS = ("SqrtBackward", "LinalgVectorNormBackward", "NormBackward", "CdistBackward", "StdBackward")
#: Ops that carry or select values and cannot make a non-finite one of finite operands.
_CARRIES = frozenset(
    {
        *("relu", "relu6", "leaky_relu", "hardtanh", "threshold", "clamp", "clamp_min", "clamp_max"),
        *("sigmoid", "hardsigmoid", "tanh", "erf", "neg", "abs", "sign", "where", "clone", "copy", "cat", "stack"),
        *("index", "index_select", "gather", "embedding", "repeat", "roll", "flip", "tril", "triu", "sort", "topk"),
        *("max", "min", "amax", "amin", "maximum", "minimum", "max_pool2d_with_indices", "constant_pad_nd"),
    }
)

_CUT = "The trace no longer says what this op read: its rows were dropped to stay within the disk budget, or were lost."


@dataclass(frozen=True, slots=True)
class Explained:
    """A cause, the op that is to be named for it, and the facts behind it."""

    cause: Cause
    seq: int  #: the op to name
    phase: str
    facts: dict[str, Any] = field(default_factory=dict)


def explain(graph: StepGraph, origin: Origin) -> Explained:
    """The cause of ``origin``; `Cause.UNKNOWN` where no rule can tell."""
    op = Executed(graph, origin.seq)
    if op.site.op in _ENTRIES:
        return Explained(_ENTRIES[Node(op.site.op)], op.seq, Phase.FORWARD, {"name": op.site.name})
    if graph.is_cut(op.seq):
        return Explained(Cause.UNKNOWN, op.seq, op.site.phase, {"why": _CUT})
    if op.site.phase == Phase.BACKWARD:
        return _in_backward(op)
    if op.site.phase == Phase.OPTIMIZER:
        return _in_optimizer(op)
    return _in_forward(op, origin)


def _in_forward(op: Executed, origin: Origin) -> Explained:
    if is_deliberate(op.graph, op.seq):
        return Explained(Cause.UNKNOWN, op.seq, Phase.FORWARD, {"why": "An infinite constant reached the result."})
    if _only_carries(op):
        return _written_behind(op)
    cause, facts = op_rules.reason(op)
    if cause in (Cause.FP16_OVERFLOW, Cause.DIVERGENCE) and cannot_overflow(op):
        return _written_behind(op)
    if op.graph.site(origin.sink).op == Node.GRADIENT and _is_masked(op):
        return Explained(Cause.WHERE_GRAD_TRAP, op.seq, Phase.FORWARD, {**facts, "masked": True})
    return Explained(cause, op.seq, Phase.FORWARD, facts)


def first_overflow(graph: StepGraph) -> Explained | None:
    """The first op of a step whose result left its dtype's range, whether or not that reached the loss."""
    for seq in sorted(graph.outputs):
        forward = graph.site(seq).phase in (Phase.FORWARD, Phase.LOSS)
        if forward and graph.bad_output(seq) is not None and not graph.bad_inputs(seq):
            explained = explain(graph, Origin(seq, 0, (seq,), seq))
            if explained.cause in (Cause.FP16_OVERFLOW, Cause.DIVERGENCE):
                return explained
    return None


def _only_carries(op: Executed) -> bool:
    """Whether the op cannot have made its result of finite operands: a cast may overflow, but never to NaN."""
    if op.gives_nan and op.name == "_to_copy":
        return True
    return op.name in _CARRIES and (op.gives_nan or not _narrows(op))


def _narrows(op: Executed) -> bool:
    """Whether the op also casts to a dtype of smaller range, which may overflow."""
    limit = rounding.LARGEST.get(op.dtype, math.inf)
    return any(rounding.LARGEST.get(dtype, limit) > limit for dtype in op.site.in_dtypes)


def _written_behind(op: Executed) -> Explained:
    """A non-finite value out of an op that only carries values, or whose operands are too small to overflow.

    An operand was finite when it was written and was changed outside torch since, so the op to name is its writer:
    of several operands, the one that was computed, rather than a weight or the cast of one.
    """
    floating = [edge for edge in op.edges if op.graph.producer(edge).min is not None]
    sites = {edge.from_seq: op.graph.site(edge.from_seq) for edge in floating}
    computed = [seq for seq, site in sites.items() if site.op not in ENTRY_NODES and not site.cast]
    writer = max(computed) if computed else next(iter(sites), op.seq)
    return Explained(Cause.HARDWARE_TRANSIENT, writer, Phase.FORWARD, {"seen_in": op.site.op})


def _in_backward(op: Executed) -> Explained:
    doomed = _doomed_forward(op)
    if doomed is not None:
        cause, facts = op_rules.reason(doomed)
        cause = Cause.WHERE_GRAD_TRAP if _is_masked(doomed) else cause
        return Explained(cause, doomed.seq, Phase.FORWARD, {**facts, "masked": True})
    node = {"grad_fn": op.site.grad_fn}
    divides = op.name in op_rules.DIVISIONS
    if divides and op.site.grad_fn.startswith(_SQUARE_ROOTS) and op.divides_by_zero:
        return Explained(Cause.SQRT_GRAD_ZERO, op.seq, Phase.BACKWARD, node)
    if op.name == "pow" and op.divides_by_zero and (op.exponent is None or op.exponent < 0):
        return Explained(Cause.POW_GRAD_ZERO, op.seq, Phase.BACKWARD, node)
    if divides and op.divides_by_zero:
        cause, facts = op_rules.unless_constant_lost(op, Cause.DIV_ZERO)
        return Explained(cause, op.seq, Phase.BACKWARD, facts | node)
    if op.dtype == "float16" and op.depends_on_gradient:
        return Explained(Cause.SCALE_OVERFLOW, op.seq, Phase.BACKWARD, node | {"dtype": op.dtype})
    cause, facts = op_rules.reason(op)
    return Explained(cause, op.seq, Phase.BACKWARD, facts | node)


def _doomed_forward(op: Executed) -> Executed | None:
    """The forward op of this autograd node, if its result was already non-finite and was masked away."""
    if op.site.forward_site is None:
        return None
    graph = op.graph
    for seq, rows in graph.outputs.items():
        if rows[0].site == op.site.forward_site and graph.bad_output(seq) is not None and not graph.bad_inputs(seq):
            return Executed(graph, seq)
    return None


def _is_masked(op: Executed) -> bool:
    """Whether a selection takes the place of the op's non-finite values at once."""
    readers = [op.graph.site(edge.seq) for edge in op.graph.readers[op.seq]]
    return any(op_name(site.op) in ("where", "masked_fill") for site in readers if site.phase != Phase.BACKWARD)


def _in_optimizer(op: Executed) -> Explained:
    lost = op.lost_constant()
    if lost is not None:
        facts = {"constant": lost.value, "becomes": lost.becomes, "dtype": lost.dtype}
        return Explained(Cause.EPS_UNDERFLOW, op.seq, Phase.OPTIMIZER, facts)
    if op.dtype in ("float16", "bfloat16"):
        return Explained(Cause.HALF_PARAMS, op.seq, Phase.OPTIMIZER, {"dtype": op.dtype})
    cause, facts = op_rules.reason(op)
    return Explained(cause, op.seq, Phase.OPTIMIZER, facts)
