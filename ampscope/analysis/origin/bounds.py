"""How large the result of an op can be at most, by what its operands held: whether an overflow is possible at all."""

from __future__ import annotations

import math

from ampscope.analysis.numerics import rounding
from ampscope.analysis.origin.op_facts import Executed, numel
from ampscope.trace.dtypes import FINFO

#: Positions of the two factors of ops that sum products; what comes before them is added.
_FACTORS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "convolution": (0, 1)}
#: In the names of ops whose results may be far larger than products of their operands.
_STEEP = ("div", "exp", "pow", "prod", "cosh", "sinh", "tan", "gamma", "reciprocal", "sqrt", "norm_backward", "log")


def is_out_of_reach(op: Executed) -> bool:
    """Whether no sum of products of four numbers each leaves the range, for all operands are so small.

    Something else is the matter then, such as a norm of zeros inside a fused op.
    """
    if op.dtype not in rounding.LARGEST or op.dtype == "float64" or any(word in op.name for word in _STEEP):
        return False  # extremes are recorded in float32
    sizes = [each.magnitude for each in op.ranges]
    known = [size for size in sizes if size is not None]
    if not known or len(known) < len(sizes):
        return False
    largest = max(1.0, *known, *(abs(value) for _, value in op.numbers()))
    terms = max((numel(shape) for shape in op.site.in_shapes), default=1)
    return 4 * math.log2(largest) + math.log2(max(1, terms)) < math.log2(rounding.LARGEST[op.dtype])


def cannot_overflow(op: Executed) -> bool:
    """Whether the operands, as they were when they were written, are too small for the result to leave its dtype."""
    most, limit = largest_possible(op), rounding.LARGEST.get(op.dtype)
    return most is not None and limit is not None and most < limit / 2


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
