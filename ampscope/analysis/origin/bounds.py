"""How large the result of an op can be at most, by what its operands held: whether an overflow is possible at all."""

from __future__ import annotations

import math

from ampscope.analysis.numerics import rounding
from ampscope.analysis.origin.op_facts import Executed, numel
from ampscope.trace.dtypes import FINFO

#: Positions of the two factors of ops that sum products; what comes before them is added.
_FACTORS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "convolution": (0, 1)}

_LOGARITHMS = frozenset({"log", "log2", "log10"})
_DIVISIONS = frozenset({"div", "true_divide", "floor_divide", "fmod", "remainder", "addcdiv", "reciprocal", "rsqrt"})
#: What lies above a dtype's largest number by less is rounded to it. Source: half a unit in the last place of bfloat16.
_ROUNDS_UP = 1 + 2**-8


def cannot_overflow(op: Executed) -> bool:
    """Whether the operands, as they were when they were written, are too small for the result to leave its dtype."""
    most, limit = largest_possible(op), rounding.LARGEST.get(op.dtype)
    return most is not None and limit is not None and most < limit / 2


def surely_overflows(op: Executed) -> bool:
    """Whether the largest element of what an op was given has a result outside of its dtype.

    Told of one tensor alone, or of one and a single number: no element of another decides then.
    """
    limit, ranges = rounding.LARGEST.get(op.dtype), op.ranges
    if limit is None or op.is_complex or "_foreach_" in op.site.op:
        return False
    if not ranges or not all(each.finite for each in ranges) or _has_impossible(op):
        return False
    sizes = [each.magnitude or 0.0 for each in ranges]
    if op.name == "mul" and sum(shape != "" for shape in op.site.in_shapes) <= 1:
        return math.prod([*sizes, *(abs(value) for _, value in op.numbers())]) > limit * _ROUNDS_UP
    if op.name == "exp":
        return (ranges[0].high or 0.0) > math.log(limit * _ROUNDS_UP)
    square = op.name == "square" or (op.name == "pow" and op.scalars.get("exponent") == 2)
    most = math.sqrt(limit * _ROUNDS_UP) if square else limit * _ROUNDS_UP
    return (square or op.name == "_to_copy") and sizes[0] > most


def _has_impossible(op: Executed) -> bool:
    """Whether an operand was measured larger than the op that wrote it can make it: then that one went wrong."""
    for edge, own in zip(op.edges, op.ranges, strict=True):
        most = largest_possible(Executed(op.graph, edge.from_seq))
        if most is not None and (own.magnitude or 0.0) > 2 * most:
            return True
    return False


def surely_undefined(op: Executed) -> bool:
    """Whether a number that was measured in what an op was given has no finite result: a zero, a negative one."""
    lowest = op.lowest_operand
    if op.is_complex or lowest is None:
        return False
    if op.name in _LOGARITHMS:
        return lowest <= 0
    if op.name in ("sqrt", "rsqrt") and lowest < 0:
        return True
    if op.name in _DIVISIONS:
        return op.given_zero_divisor if op.divisors else op.divides_by_zero
    exponent = op.scalars.get("exponent")
    if op.name != "pow" or not isinstance(exponent, (int, float)):
        return False
    return (exponent < 0 and op.given_zero_divisor) or (lowest < 0 and not float(exponent).is_integer())


def largest_possible(op: Executed) -> float | None:
    """The largest magnitude that sums, products and sums of products can come to; None for other ops.

    Also None where an operand was not measured, was not finite, or is larger than a trace can say.
    """
    sizes = {edge.arg: each.magnitude for edge, each in zip(op.edges, op.ranges, strict=True) if each.finite}
    largest = {arg: size for arg, size in sizes.items() if size is not None and size < FINFO["float32"].max}
    if len(largest) != len(op.site.in_dtypes) or not largest:
        return None
    scalar = max([1.0, *(abs(value) for _, value in op.numbers())])
    if op.name in ("add", "sub", "rsub"):
        return (sum(largest.values()) + scalar) * scalar
    if op.name == "mul":
        product = scalar
        for size in largest.values():
            product *= size
        return product
    return _sum_of_products(op, largest, scalar) if op.name in _FACTORS else None


def _sum_of_products(op: Executed, largest: dict[int, float], scalar: float) -> float | None:
    first, second = _FACTORS[op.name]
    if first not in largest or second not in largest:
        return None
    terms = _terms(op, first, second)
    added = sum(size for arg, size in largest.items() if arg not in (first, second))
    return (largest[first] * largest[second] * terms + added) * scalar


def _terms(op: Executed, first: int, second: int) -> int:
    """How many products are summed for one element of the result."""
    if op.name == "convolution":
        weight = op.site.in_shapes[second]
        return numel(weight) // max(1, int(weight.split("x")[0]))
    return int(op.site.in_shapes[first].rsplit("x", 1)[-1])
