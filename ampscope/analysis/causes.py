"""From an origin to its cause: what the op means, what its operands held, and which constants survived their dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ampscope.analysis import rounding
from ampscope.analysis.stepgraph import StepGraph
from ampscope.provenance import Origin, has_nan
from ampscope.trace.schema import Node, OpRow, Phase, SiteRow
from ampscope.trace.vocabulary import Cause

_LOGS = ("log", "log2", "log10", "log1p", "xlogy", "special_xlog1py")
_DIVISIONS = ("div", "reciprocal", "true_divide", "floor_divide", "fmod", "remainder")
_SOFTMAXES = ("_softmax", "_log_softmax", "_safe_softmax")
_STATISTICS = ("std", "var", "std_mean", "var_mean", "mean", "native_batch_norm", "native_layer_norm")
_SQUARE_ROOTS = ("SqrtBackward", "LinalgVectorNormBackward", "NormBackward", "CdistBackward", "StdBackward")
#: Ops that carry or select values and cannot make a non-finite one of finite operands.
_CARRIES = frozenset(
    "relu clone copy cat stack index index_select gather embedding max_pool2d_with_indices max_pool1d adaptive_max_pool2d "
    "neg abs leaky_relu threshold hardtanh clamp clamp_min clamp_max maximum minimum max min amax amin where sigmoid tanh "
    "repeat roll flip tril triu constant_pad_nd sort topk erf sign relu6 hardsigmoid upsample_nearest2d".split()
)
#: How many ops back a constant is looked for that should have kept an operand away from zero.
_REACH = 8


@dataclass(frozen=True, slots=True)
class Explained:
    """A cause, the op that is to be named for it, and the facts behind it."""

    cause: Cause
    seq: int  #: the op to name
    phase: str
    facts: dict[str, Any] = field(default_factory=dict)


def base_name(op: str) -> str:
    """``div`` for ``aten.div.Tensor``, ``addcdiv`` for ``aten.addcdiv_.default``."""
    name = op.split(".")[1] if "." in op else op
    return name.rstrip("_") if not name.startswith("__") else name


def explain(graph: StepGraph, origin: Origin) -> Explained:
    """The cause of ``origin``; `Cause.UNKNOWN` where no rule can tell."""
    site = graph.site(origin.seq)
    entry = {Node.INPUT: Cause.BAD_INPUT, Node.PARAMETER: Cause.BAD_WEIGHT, Node.BUFFER: Cause.BAD_BUFFER}
    if site.op in entry:
        return Explained(entry[Node(site.op)], origin.seq, Phase.FORWARD, {"name": site.name})
    if site.phase == Phase.BACKWARD:
        return _in_backward(graph, origin.seq, site)
    if site.phase == Phase.OPTIMIZER:
        return _in_optimizer(graph, origin.seq, site)
    if base_name(site.op) in _CARRIES:
        return _written_behind(graph, origin.seq)
    cause, facts = _of_op(graph, origin.seq, site)
    return Explained(cause, origin.seq, Phase.FORWARD, facts)


def _written_behind(graph: StepGraph, seq: int) -> Explained:
    """A non-finite value out of an op that only carries values: its operand was changed outside torch after it was
    written, so the op to name is the one that wrote it."""
    floating = [e for e in sorted(graph.inputs[seq], key=lambda e: e.arg) if graph.producer(e).min is not None]
    writer = floating[0].from_seq if floating else seq
    return Explained(Cause.HARDWARE_TRANSIENT, writer, Phase.FORWARD, {"seen_in": graph.site(seq).op})


# -- forward ------------------------------------------------------------------------------------------------------


def _of_op(graph: StepGraph, seq: int, site: SiteRow) -> tuple[Cause, dict[str, Any]]:
    """The cause of an op that made a non-finite value of finite operands (or a NaN of a deliberate mask)."""
    name, dtype = base_name(site.op), _dtype(site)
    operands = list(_inputs(graph, seq))
    literal = _literal_overflow(graph, seq, dtype)
    if literal is not None:
        return Cause.LITERAL_OVERFLOW, {"literal": literal, "dtype": dtype}
    if name in _SOFTMAXES or "scaled_dot_product" in name:
        return _softmax(operands)
    if "ctc_loss" in name:
        return Cause.CTC_INFEASIBLE, {}
    if name in _LOGS:
        return _with_lost_bound(graph, seq, Cause.LOG_ZERO)
    if name in _STATISTICS and _too_few(graph, seq, site):
        return Cause.DIV_ZERO, {"of": "too few values"}
    if name in ("sqrt", "rsqrt") and any(low is not None and low < 0 for low, _ in operands):
        return Cause.SQRT_NEGATIVE, {"lowest": min(low for low, _ in operands if low is not None)}
    if name in _DIVISIONS or name in ("rsqrt", "addcdiv") or (name == "pow" and _exponent(graph, seq) < 0):
        if _divisor_has_zero(graph, seq, name):
            return _with_lost_bound(graph, seq, Cause.DIV_ZERO)
    if name in ("acos", "asin", "atanh", "acosh", "lgamma", "digamma"):
        return Cause.UNKNOWN, {"why": f"{name} outside the range where it is defined"}
    row = graph.bad_output(seq)
    if row is not None and _result_too_large(row, dtype):
        return _overflow(dtype), {"dtype": dtype, "largest": _largest_operand(operands)}
    return Cause.UNKNOWN, {}


def _dtype(site: SiteRow) -> str:
    return next(iter(site.out_dtypes), "")


def _overflow(dtype: str) -> Cause:
    return Cause.FP16_OVERFLOW if dtype == "float16" else Cause.DIVERGENCE


def _result_too_large(row: OpRow, dtype: str) -> bool:
    """Whether an infinity (or the NaN of inf - inf inside a sum of products) came from exceeding the dtype's range."""
    return dtype in rounding.LARGEST and not (has_nan(row) and row.posinf == 0 and row.neginf == 0 and row.numel == 0)


def _inputs(graph: StepGraph, seq: int) -> Iterator[tuple[float | None, float | None]]:
    """Min and max of each floating operand."""
    for edge in sorted(graph.inputs[seq], key=lambda edge: edge.arg):
        if edge.partial:
            yield edge.min, edge.max
        else:
            row = graph.producer(edge)
            yield row.min, row.max


def _largest_operand(operands: list[tuple[float | None, float | None]]) -> float | None:
    magnitudes = [abs(v) for pair in operands for v in pair if v is not None and math.isfinite(v)]
    return max(magnitudes, default=None)


def _literal_overflow(graph: StepGraph, seq: int, dtype: str) -> float | None:
    numbers = (v for v in graph.scalars(seq).values() if isinstance(v, (int, float)) and not isinstance(v, bool))
    return next((float(v) for v in numbers if dtype in rounding.LARGEST and rounding.overflows(float(v), dtype)), None)


def _softmax(operands: list[tuple[float | None, float | None]]) -> tuple[Cause, dict[str, Any]]:
    lows = [low for low, _ in operands if low is not None]
    if any(low == -math.inf for low in lows) or not lows:
        return Cause.ALL_MASKED_SOFTMAX, {}
    return Cause.UNKNOWN, {"why": "a softmax of finite values that is not finite"}


def _too_few(graph: StepGraph, seq: int, site: SiteRow) -> bool:
    """Whether a statistic was taken over nothing, or a sample deviation over one value."""
    sizes = [_numel(shape) for shape in site.in_shapes[:1]]
    results = [_numel(shape) for shape in site.out_shapes[:1]]
    if not sizes or not results:
        return False
    per_result = sizes[0] / max(1, results[0])
    return sizes[0] == 0 or (per_result <= 1 and base_name(site.op).startswith(("std", "var")))


def _numel(shape: str) -> int:
    return math.prod(int(size) for size in shape.split("x")) if shape else 1


def _exponent(graph: StepGraph, seq: int) -> float:
    return float(next((v for v in graph.scalars(seq).values() if isinstance(v, (int, float))), 1.0))


def _divisor_has_zero(graph: StepGraph, seq: int, name: str) -> bool:
    operands = list(_inputs(graph, seq))
    position = {"div": 1, "true_divide": 1, "floor_divide": 1, "fmod": 1, "remainder": 1, "addcdiv": 2}.get(name, 0)
    if position >= len(operands):
        return any(value == 0 for value in graph.scalars(seq).values())
    low, high = operands[position]
    if low is None or high is None:
        return False
    return low <= 0 <= high and (low == 0 or high == 0 or _zeros(graph, seq, position) > 0)


def _zeros(graph: StepGraph, seq: int, position: int) -> int:
    edge = next((edge for edge in graph.inputs[seq] if edge.arg == position), None)
    return (graph.producer(edge).zeros or 0) if edge is not None else 0


def _with_lost_bound(graph: StepGraph, seq: int, cause: Cause) -> tuple[Cause, dict[str, Any]]:
    """``cause``, unless a constant that was to keep the operand away from zero did not survive its dtype."""
    lost = lost_constant(graph, seq)
    return (Cause.EPS_UNDERFLOW, lost) if lost else (cause, {})


def lost_constant(graph: StepGraph, seq: int) -> dict[str, Any]:
    """A small constant (or a bound just below 1) upstream of an op that its dtype rounded away; empty without one."""
    seen, front = {seq}, [seq]
    for _ in range(_REACH):
        for here in front:
            found = _lost_in(graph, here)
            if found:
                return found
        front = [e.from_seq for here in front for e in graph.inputs[here] if e.from_seq not in seen]
        seen.update(front)
    return {}


def _lost_in(graph: StepGraph, seq: int) -> dict[str, Any]:
    site = graph.site(seq)
    name, dtype = base_name(site.op), _dtype(site)
    if dtype not in rounding.EPSILON or not name.startswith(("add", "sub", "rsub", "clamp", "maximum", "threshold")):
        return {}
    for argument, value in graph.scalars(seq).items():
        if argument in ("alpha",) or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if rounding.vanishes(float(value), dtype):
            return {"constant": value, "becomes": 0.0, "dtype": dtype, "bound_seq": seq}
        if name.startswith("clamp") and rounding.rounds_to_one(float(value), dtype):
            return {"constant": value, "becomes": 1.0, "dtype": dtype, "bound_seq": seq}
    return {}


def first_overflow(graph: StepGraph) -> Explained | None:
    """The first op of a step whose result left its dtype's range, whether or not that reached the loss."""
    for seq in sorted(graph.outputs):
        site = graph.site(seq)
        if site.phase in (Phase.FORWARD, Phase.LOSS) and graph.bad_output(seq) and not graph.bad_inputs(seq):
            explained = explain(graph, Origin(seq, 0, (seq,), seq))
            if explained.cause in (Cause.FP16_OVERFLOW, Cause.DIVERGENCE):
                return explained
    return None


# -- backward -----------------------------------------------------------------------------------------------------


def _in_backward(graph: StepGraph, seq: int, site: SiteRow) -> Explained:
    doomed = _doomed_forward(graph, site)
    if doomed is not None:
        cause, facts = _of_op(graph, doomed, graph.site(doomed))
        return Explained(cause, doomed, Phase.FORWARD, facts | {"masked": True})
    name, dtype = base_name(site.op), _dtype(site)
    divides = name in _DIVISIONS or name == "rsqrt"
    if site.grad_fn.startswith(_SQUARE_ROOTS) and divides:
        return Explained(Cause.SQRT_GRAD_ZERO, seq, Phase.BACKWARD, {"grad_fn": site.grad_fn})
    if site.grad_fn.startswith("PowBackward") and not _grew(graph, seq):
        return Explained(Cause.POW_GRAD_ZERO, seq, Phase.BACKWARD, {"grad_fn": site.grad_fn})
    if divides and _divisor_has_zero(graph, seq, name):
        cause, facts = _with_lost_bound(graph, seq, Cause.DIV_ZERO)
        return Explained(cause, seq, Phase.BACKWARD, facts | {"grad_fn": site.grad_fn})
    if dtype == "float16":
        return Explained(Cause.SCALE_OVERFLOW, seq, Phase.BACKWARD, {"dtype": dtype, "grad_fn": site.grad_fn})
    cause, facts = _of_op(graph, seq, site)
    return Explained(cause, seq, Phase.BACKWARD, facts | {"grad_fn": site.grad_fn})


def _grew(graph: StepGraph, seq: int) -> bool:
    """Whether the operands of a power were so large that the result merely left its dtype's range."""
    largest = _largest_operand(list(_inputs(graph, seq)))
    return largest is not None and largest > 1e3


def _doomed_forward(graph: StepGraph, site: SiteRow) -> int | None:
    """A forward op of this site's autograd node whose result was already non-finite and then masked away."""
    if site.forward_site is None:
        return None
    for seq, rows in graph.outputs.items():
        if rows[0].site == site.forward_site and graph.bad_output(seq) is not None and not graph.bad_inputs(seq):
            return seq
    return None


# -- optimizer ----------------------------------------------------------------------------------------------------


def _in_optimizer(graph: StepGraph, seq: int, site: SiteRow) -> Explained:
    lost = lost_constant(graph, seq)
    if lost:
        return Explained(Cause.EPS_UNDERFLOW, seq, Phase.OPTIMIZER, lost)
    if _dtype(site) in ("float16", "bfloat16"):
        return Explained(Cause.HALF_PARAMS, seq, Phase.OPTIMIZER, {"dtype": _dtype(site)})
    cause, facts = _of_op(graph, seq, site)
    return Explained(cause, seq, Phase.OPTIMIZER, facts)
