"""What an op needs and another lost upstream: a constant that its dtype rounded, a value flushed to zero."""

from __future__ import annotations

from typing import NamedTuple

from ampscope.analysis.numerics import rounding
from ampscope.analysis.origin.op_facts import Executed

#: Ops that add a small constant or bound their operand.
_KEEPS_AWAY = frozenset({"add", "sub", "rsub", "clamp", "clamp_min", "clamp_max", "maximum", "threshold"})
#: Ops whose result may be smaller than any operand.
_SHRINKS = frozenset("mul pow square exp _to_copy sigmoid _softmax div prod cumprod exp2 erfc".split())  # noqa: SIM905  # a word list
#: Those that are zero in any dtype of operands below the second number, where float32 ends.
_EXPONENTIALS, _LOWEST_EXPONENT = frozenset({"exp", "exp2", "sigmoid"}), -103.0


class RoundedConstant(NamedTuple):
    """A constant that its dtype rounded away."""

    value: float
    becomes: float
    dtype: str
    seq: int


def rounded_constant(op: Executed) -> RoundedConstant | None:
    """A small constant (or a bound just below 1) that was to keep the divisor from zero and was rounded away."""
    return next((lost for each in op.upstream() if (lost := _rounded_here(each))), None)


def flushed_by(op: Executed) -> Executed | None:
    """The nearest op upstream that made a zero of operands without any, in a dtype too small for the result."""
    return next((each for each in op.upstream() if _flushes(each)), None)


def divides_by_what_was_zero(op: Executed) -> bool:
    """Whether a divisor is zero that no op of the step made so: each zero upstream came of another, in any dtype."""
    if not op.divides_by_zero:
        return False
    above = [each for each in op.upstream() if each.seq != op.seq and each.result.statistics.zeros]
    return bool(above) and not any(_makes_zero(each) for each in above)


def _makes_zero(op: Executed) -> bool:
    """Whether there is a zero in its result, and none in what it read."""
    read = [op.graph.producer(edge) for edge in op.edges if not edge.partial]
    return bool(read) and not any(row.min is not None and row.statistics.zeros for row in read)


def _rounded_here(op: Executed) -> RoundedConstant | None:
    if op.dtype not in rounding.EPSILON:
        return None
    if op.site.cast and op.result.numel == 1:
        return _cast_here(op)
    if op.name not in _KEEPS_AWAY:
        return None
    for name, value in op.numbers():
        if name != "alpha" and rounding.vanishes(value, op.dtype) and _spans(op, 0.0):
            return RoundedConstant(value, 0.0, op.dtype, op.seq)
        if op.name.startswith("clamp") and rounding.rounds_to_one(value, op.dtype) and _spans(op, 1.0):
            return RoundedConstant(value, 1.0, op.dtype, op.seq)
    return None


def _cast_here(op: Executed) -> RoundedConstant | None:
    """A constant kept in a tensor of one element, which the cast to a smaller dtype makes zero."""
    value = op.largest_operand
    lost = value is not None and rounding.vanishes(value, op.dtype)
    return RoundedConstant(value, 0.0, op.dtype, op.seq) if lost and value is not None else None


def _spans(op: Executed, value: float) -> bool:
    """Whether the result may hold ``value``; what was not measured may."""
    low, high = op.result.min, op.result.max
    return low is None or high is None or not (low > value or high < value)


def _flushes(op: Executed) -> bool:
    if op.name not in _SHRINKS or op.dtype != "float16" or not op.result.statistics.zeros:
        return False
    if op.graph.bad_inputs(op.seq) or op.infinite_constant is not None:
        return False  # a number over an infinity is zero
    if any(value == 0 for _, value in op.numbers()):
        return False  # so is a product with zero
    read = [op.graph.producer(edge) for edge in op.edges if not edge.partial]
    if not read or any(row.min is None or row.statistics.zeros != 0 for row in read):
        return False
    return op.name not in _EXPONENTIALS or min(row.min or 0.0 for row in read) > _LOWEST_EXPONENT
