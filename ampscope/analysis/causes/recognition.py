"""From the origin of a failure to its cause: which op to name for it, in which phase, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampscope.analysis import rounding
from ampscope.analysis.causes.catalogue import CATALOGUE, OP_RULES
from ampscope.analysis.causes.cause_entry import NOTHING_MORE, Match, Reason
from ampscope.analysis.causes.outside import ChangedSince, FromOthers
from ampscope.analysis.causes.unknown import Observed, infinite_constant, not_measured
from ampscope.analysis.op_facts import Executed, cannot_overflow, is_out_of_reach, operand_dtype, unmeasured
from ampscope.analysis.rounding import is_floating
from ampscope.analysis.step_graph import StepGraph, module_of_update
from ampscope.provenance import Origin, absorbed, is_deliberate, is_discarded, op_name
from ampscope.trace.dtypes import FLOAT8, PARTS
from ampscope.trace.schema import ENTRY_NODES, Node, Phase, said
from ampscope.trace.vocabulary import Cause

#: Ops that carry or select values and cannot make a non-finite one of finite operands.
_CARRIES = frozenset(
    {
        *("relu", "relu6", "leaky_relu", "hardtanh", "threshold", "clamp", "clamp_min", "clamp_max"),
        *("sigmoid", "hardsigmoid", "tanh", "erf", "neg", "abs", "sign", "where", "clone", "copy", "cat", "stack"),
        *("index", "index_select", "gather", "embedding", "repeat", "roll", "flip", "tril", "triu", "sort", "topk"),
        *("max", "min", "amax", "amin", "maximum", "minimum", "max_pool2d_with_indices", "constant_pad_nd"),
    }
)
#: Of these, the ops that compute with the parts of a complex number, and may overflow.
_COMPUTES_COMPLEX = frozenset({"abs", "sigmoid", "tanh"})
#: Causes of a result that left its dtype's range, for want of any other reason.
_OUT_OF_RANGE = (Cause.FP16_OVERFLOW, Cause.DIVERGENCE)

_CUT = Observed(
    sentence="The trace no longer says what this op read: its rows were dropped to stay within the disk budget, or "
    "were lost."
)
_FINITE_HERE = Observed(
    sentence="This op's own result was measured and is finite, and what read it found it non-finite: it was written "
    "into in between, by something that the trace does not show."
)


@dataclass(frozen=True, slots=True)
class Recognised:
    """A cause, the op that is to be named for it, and what was seen."""

    cause: Cause
    seq: int  #: the op to name
    phase: str
    reason: Reason = NOTHING_MORE
    masked: bool = False  #: the value was masked in forward, and only its gradient failed


def recognise(graph: StepGraph, origin: Origin) -> Recognised:
    """The cause of ``origin``; `Cause.UNKNOWN` where no rule can tell."""
    op = Executed(graph, origin.seq)
    if op.site.op in ENTRY_NODES:
        return _matched(op, Phase.FORWARD)
    if op.communicates:
        return _matched(op, said(Phase, op.site.phase, Phase.FORWARD))
    if graph.is_cut(op.seq) or graph.bad_output(op.seq) is None:
        return Recognised(Cause.UNKNOWN, op.seq, op.site.phase, _CUT if graph.is_cut(op.seq) else _FINITE_HERE)
    if op.site.phase == Phase.BACKWARD:
        return _in_backward(op)
    if op.site.phase == Phase.OPTIMIZER:
        return _matched(op, Phase.OPTIMIZER)
    return _in_forward(op, origin)


def first_overflow(graph: StepGraph) -> Recognised | None:
    """The first op of a step whose result left its dtype's range, whether or not that reached the loss."""
    for seq in sorted(graph.outputs):
        forward = graph.site(seq).phase in (Phase.FORWARD, Phase.LOSS)
        if forward and graph.bad_output(seq) is not None and not graph.bad_inputs(seq):
            found = recognise(graph, Origin(seq, 0, (seq,), seq))
            if found.cause in _OUT_OF_RANGE:
                return found
    return None


def parameters_module(graph: StepGraph, found: Recognised) -> str:
    """The module of the one parameter for which an optimizer's op failed; empty for what an optimizer does to all."""
    of_all = found.cause in (Cause.EPS_UNDERFLOW, Cause.HALF_PARAMS)
    return "" if found.phase != Phase.OPTIMIZER or of_all else module_of_update(graph, found.seq)


def _matched(op: Executed, phase: Phase) -> Recognised:
    cause, reason = match(op, phase)
    return Recognised(cause, op.seq, phase, reason)


def match(op: Executed, phase: Phase) -> Match:
    """Returns the cause that the first applicable rule of a phase names; `Cause.UNKNOWN` where none applies.

    No cause is told of an op whose operands were not all measured, unless what it was told to do shows it.
    """
    missing = not_measured(op)
    rules = [rule for rule in OP_RULES if rule.phase in (None, phase) and not (missing and rule.by_operands)]
    asked = (rule.match(op) for rule in rules)
    return next(
        (found for found in asked if found is not None and _is_possible(op, found)), missing or Match(Cause.UNKNOWN)
    )


def _is_possible(op: Executed, found: Match) -> bool:
    """Whether an op's operands allow for what a rule says of it."""
    nan_of_small = op.gives_nan and not cannot_overflow(op) and is_out_of_reach(op)
    return found.cause not in _OUT_OF_RANGE or not nan_of_small


def _in_forward(op: Executed, origin: Origin) -> Recognised:
    if is_deliberate(op.graph, op.seq):
        return Recognised(Cause.UNKNOWN, op.seq, Phase.FORWARD, infinite_constant(op))
    if _only_carries(op) and unmeasured(op) is None:
        return _changed_since(op)
    cause, reason = match(op, Phase.FORWARD)
    if cause in _OUT_OF_RANGE and cannot_overflow(op):
        return _changed_since(op)
    swallowed = _swallowed_before(op)
    if swallowed is not None:
        return recognise(op.graph, swallowed)
    if op.graph.site(origin.sink).op == Node.GRADIENT and _is_masked(op, cause):
        return Recognised(Cause.WHERE_GRAD_TRAP, op.seq, Phase.FORWARD, reason, masked=True)
    return Recognised(cause, op.seq, Phase.FORWARD, reason)


def _swallowed_before(op: Executed) -> Origin | None:
    """The infinity that made the zero which an op divides by: a number over it is zero."""
    zeros = {
        each.seq
        for each in op.upstream()
        if each.seq != op.seq and op.graph.bad_inputs(each.seq) and op.graph.bad_output(each.seq) is None
    }
    return next((origin for origin in absorbed(op.graph) if origin.sink in zeros), None) if zeros else None


def _only_carries(op: Executed) -> bool:
    """Whether the op cannot have made its result of finite operands: a cast may overflow, but never to NaN.

    Only 8-bit dtypes have none but NaN for what is too large.
    """
    if op.gives_nan and op.name == "_to_copy":
        return op.dtype not in FLOAT8
    if op.name in _COMPUTES_COMPLEX and PARTS.keys() & set(op.site.in_dtypes):
        return False
    return op.name in _CARRIES and (op.gives_nan or not _narrows(op))


def _narrows(op: Executed) -> bool:
    """Whether the op also casts to a dtype of smaller range, which may overflow."""
    limit = rounding.LARGEST.get(op.dtype, math.inf)
    return any(rounding.LARGEST.get(PARTS.get(dtype, dtype), limit) > limit for dtype in op.site.in_dtypes)


def _changed_since(op: Executed) -> Recognised:
    """A non-finite value out of an op that only carries values, or whose operands are too small to overflow.

    An operand was finite when it was written and was changed outside torch since, so the op to name is its writer:
    of several operands, the one that was computed, rather than a weight or the cast of one. Whether it was the device,
    or code, one execution alone does not tell.
    """
    exchange = _unread_exchange(op)
    if exchange is not None:
        received = FromOthers.of(exchange, unseen=True)
        return Recognised(Cause.RECEIVED, exchange.seq, exchange.site.phase, received)
    floating = [edge for edge in op.edges if is_floating(operand_dtype(op, edge))]
    sites = {edge.from_seq: op.graph.site(edge.from_seq) for edge in floating}
    computed = [seq for seq, site in sites.items() if site.op not in ENTRY_NODES and not site.cast]
    writer = max(computed) if computed else next(iter(sites), op.seq)
    reason = ChangedSince(written_by=op.graph.site(writer).op, seen_in=op.site.op)
    return Recognised(Cause.HARDWARE_TRANSIENT, writer, Phase.FORWARD, reason)


def _unread_exchange(op: Executed) -> Executed | None:
    """The op that communicated after an operand was written, and whose result no op is seen to read.

    Code that torch calls by itself took it on: ``DistributedDataParallel`` brings what its communication hook returns
    back into the gradients.
    """
    written = max((edge.from_seq for edge in op.edges), default=op.seq)
    between = (Executed(op.graph, seq) for seq in range(op.seq - 1, written, -1) if seq in op.graph.outputs)
    return next((each for each in between if each.communicates and not op.graph.readers[each.seq]), None)


def _in_backward(op: Executed) -> Recognised:
    doomed = _doomed_forward(op)
    if doomed is None:
        return _matched(op, Phase.BACKWARD)
    if doomed.site.phase == Phase.BACKWARD:  # a gradient of a gradient
        return _matched(doomed, Phase.BACKWARD)
    cause, reason = match(doomed, Phase.FORWARD)
    cause = Cause.WHERE_GRAD_TRAP if _is_masked(doomed, cause) else cause
    return Recognised(cause, doomed.seq, Phase.FORWARD, reason, masked=True)


def _doomed_forward(op: Executed) -> Executed | None:
    """The forward op of this autograd node, if its result was already non-finite and was masked away."""
    if op.site.forward_site is None:
        return None
    graph = op.graph
    for seq, rows in graph.outputs.items():
        if rows[0].site == op.site.forward_site and graph.bad_output(seq) is not None and not graph.bad_inputs(seq):
            return Executed(graph, seq)
    return None


def _is_masked(op: Executed, cause: Cause) -> bool:
    """Whether forward goes on without the op's non-finite values: backward alone meets them, as 0 times an infinity.

    What float32 has as numbers is a matter of precision, and a NaN has a cause of its own; not where a mask takes its
    place at once.
    """
    readers = [op.graph.site(edge.seq) for edge in op.graph.readers[op.seq]]
    if any(op_name(site.op) in ("where", "masked_fill") for site in readers if site.phase != Phase.BACKWARD):
        return True
    otherwise = op.gives_nan or CATALOGUE[cause].cured_by_precision
    return not otherwise and is_discarded(op.graph, op.seq)
