"""What each kind of op means when it makes a non-finite value of finite operands: one rule a kind, tried in order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ampscope.analysis.numerics import rounding
from ampscope.analysis.origin.op_facts import Executed, numel
from ampscope.trace.vocabulary import Cause

LOGARITHMS = frozenset({"log", "log2", "log10", "log1p", "xlogy", "special_xlog1py", "logit"})
DIVISIONS = frozenset({"div", "true_divide", "floor_divide", "fmod", "remainder", "addcdiv", "reciprocal", "rsqrt"})
STATISTICS = frozenset({"std", "var", "std_mean", "var_mean", "mean", "native_batch_norm", "_native_batch_norm_legit"})
DEFINED_ON_PART = frozenset({"acos", "asin", "atanh", "acosh", "erfinv", "lgamma", "digamma"})


class Reason(NamedTuple):
    """A cause and the facts behind it, for the explanation and the remedies."""

    cause: Cause
    facts: dict[str, Any]


Rule = Callable[[Executed], Reason | None]


def reason(op: Executed) -> Reason:
    """The first rule that applies; `Cause.UNKNOWN` where none does."""
    found = (rule(op) for rule in _RULES)
    return next((each for each in found if each is not None), Reason(Cause.UNKNOWN, {}))


def unless_constant_lost(op: Executed, cause: Cause) -> Reason:
    """``cause``, unless a constant that was to keep the operand from zero did not survive its dtype."""
    lost = op.lost_constant()
    if lost is not None:
        facts = {"constant": lost.value, "becomes": lost.becomes, "dtype": lost.dtype, "lost_by": lost.seq}
        return Reason(Cause.EPS_UNDERFLOW, facts)
    return Reason(cause, {})


def _literal(op: Executed) -> Reason | None:
    literal = op.literal_too_large
    return Reason(Cause.LITERAL_OVERFLOW, {"literal": literal, "dtype": op.dtype}) if literal is not None else None


def _infinite_constant(op: Executed) -> Reason | None:
    """A constant that is infinite on purpose, as in a mask, and reached what matters or made a NaN at once."""
    constant = op.infinite_constant
    if constant is None:
        return None
    made = f"{op.name} was given the constant {constant}"
    if op.gives_nan:
        return Reason(Cause.UNKNOWN, {"why": f"{made}, and 0 times an infinity (or inf - inf) is NaN."})
    return Reason(Cause.UNKNOWN, {"why": f"{made}, and nothing took the infinity away before the result."})


def _softmax(op: Executed) -> Reason | None:
    if "softmax" not in op.name and "scaled_dot_product" not in op.name:
        return None
    masked = any(each.low == -math.inf for each in op.ranges)
    return Reason(Cause.ALL_MASKED_SOFTMAX, {}) if masked else None


def _infinite_operand(op: Executed) -> Reason | None:
    """A mask's -inf met another one, as in a softmax by hand over a row without a single key left: inf - inf."""
    infinite = any(end is not None and math.isinf(end) for each in op.ranges for end in each)
    if not infinite or not op.gives_nan:
        return None
    if op.name in ("sub", "add", "rsub") and any(each.low == -math.inf for each in op.ranges):
        return Reason(Cause.ALL_MASKED_SOFTMAX, {})
    return Reason(Cause.UNKNOWN, {"why": f"{op.name} was given an infinity, and 0 times that (or inf - inf) is NaN."})


def _ctc(op: Executed) -> Reason | None:
    return Reason(Cause.CTC_INFEASIBLE, {}) if "ctc_loss" in op.name else None


def _logarithm(op: Executed) -> Reason | None:
    if op.name not in LOGARITHMS:
        return None
    lowest = op.lowest_operand
    if op.gives_nan and lowest is not None and lowest < 0:
        return Reason(Cause.LOG_ZERO, {"lowest": lowest})
    found = unless_constant_lost(op, Cause.LOG_ZERO)
    flushed = op.flushed() if found.cause is Cause.LOG_ZERO else None
    return Reason(Cause.LOG_ZERO, _flushed_by(flushed)) if flushed is not None else found


def _flushed_by(op: Executed) -> dict[str, Any]:
    return {"dtype": op.dtype, "by": op.site.op, "lost_by": op.seq}


def _too_few_values(op: Executed) -> Reason | None:
    """A mean of nothing, a deviation of one value, an averaged loss without a single target."""
    if op.name.startswith("nll_loss"):
        weight = next((row.max for row in op.graph.outputs[op.seq] if row.out == 1), None)
        return Reason(Cause.DIV_ZERO, {"of": "no target at all"}) if weight == 0 else None
    shapes, results = op.site.in_shapes[:1], op.site.out_shapes[:1]
    if op.name not in STATISTICS or not shapes or not results:
        return None
    values = numel(shapes[0]) / max(1, numel(results[0]))
    too_few = values == 0 or (values <= 1 and op.name.startswith(("std", "var")))
    return Reason(Cause.DIV_ZERO, {"of": "too few values"}) if too_few else None


def _negative_root(op: Executed) -> Reason | None:
    exponent = op.scalars.get("exponent")
    fraction = op.name == "pow" and isinstance(exponent, float) and not exponent.is_integer()
    lowest = op.lowest_operand
    if (fraction or op.name in ("sqrt", "rsqrt")) and lowest is not None and lowest < 0:
        return Reason(Cause.SQRT_NEGATIVE, {"lowest": lowest})
    return None


def _division(op: Executed) -> Reason | None:
    divides = op.name in DIVISIONS or (op.name == "pow" and (op.exponent is None or op.exponent < 0))
    if not divides or not op.divides_by_zero:
        return None
    found = unless_constant_lost(op, Cause.DIV_ZERO)
    flushed = op.flushed() if found.cause is Cause.DIV_ZERO else None
    if flushed is not None:
        return Reason(Cause.FP16_UNDERFLOW, _flushed_by(flushed))
    return found


def _out_of_domain(op: Executed) -> Reason | None:
    if op.name not in DEFINED_ON_PART:
        return None
    return Reason(Cause.UNKNOWN, {"why": f"{op.name} was given a number outside the range where it is defined."})


def _overflow(op: Executed) -> Reason | None:
    """What is left: a sum, a product or a power (a NaN too: inf - inf inside a sum of products) beyond the range."""
    unknown = op.gives_nan and not op.site.op.startswith("aten.")
    if op.dtype not in rounding.LARGEST or unknown:
        return None
    facts = {"dtype": op.dtype, "largest": op.largest_operand}
    return Reason(Cause.FP16_OVERFLOW if op.dtype == "float16" else Cause.DIVERGENCE, facts)


_RULES: tuple[Rule, ...] = (
    _literal,
    _infinite_constant,
    _softmax,
    _infinite_operand,
    _ctc,
    _logarithm,
    _too_few_values,
    _negative_root,
    _division,
    _out_of_domain,
    _overflow,
)
