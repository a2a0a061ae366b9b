"""How a result grows with the loss scale, given how its operands do.

A value that is proportional to the scale has degree 1 (a scaled gradient, its norm), its square 2, a ratio of two such
values 0: each is homogeneous in the scale, of that degree. What is bounded by a constant, or added to one, is no power
of the scale at all: with another scale it would be another value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from ampscope.trace.vocabulary import Cause


class ScaleDependence(NamedTuple):
    """How a value depends on the loss scale."""

    degree: float = 0.0
    inhomogeneous: Cause | None = None  #: no power of the scale; the mistake of putting such a value into a gradient
    of_scale: bool = False  #: made of the scale and constants alone
    unscaled: bool = False  #: was scaled, and the scale was divided out
    unknown: bool = False  #: it was written where nobody heard: nothing can be said of it


DependenceOf = Callable[[Any], ScaleDependence]

CONSTANT = ScaleDependence()
SCALED = ScaleDependence(1.0)
OF_SCALE = ScaleDependence(1.0, of_scale=True)
FREE = ScaleDependence(unscaled=True)
UNKNOWN = ScaleDependence(unknown=True)

_BOUNDED = ScaleDependence(inhomogeneous=Cause.MISUSE_CLIP_BEFORE_UNSCALE)
_ADDED = ScaleDependence(inhomogeneous=Cause.MISUSE_NO_UNSCALE)

#: Below this a number only keeps a divisor away from zero; above the other it bounds nothing.
_TINY, _HUGE = 1e-3, 1e15


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COMPARISONS = _words("gt lt ge le eq ne greater less greater_equal less_equal not_equal")
_FREE = _words(
    "isfinite isnan isinf isposinf isneginf sign sgn signbit any all argmax argmin argsort count_nonzero nonzero numel "
    "size dim ones_like zeros_like full_like empty_like rand_like randn_like randint_like is_floating_point"
)
_PRODUCTS = _words("mul multiply imul matmul mm mv bmm dot vdot inner outer einsum")
QUOTIENTS = _words("div divide true_divide idiv")
_SUMS = _words("add iadd sub isub subtract rsub lerp hypot addcmul addcdiv")
_BOUNDS = _words("clamp clip clamp_min clamp_max minimum maximum fmin fmax hardtanh renorm threshold")
_CURVES = _words(
    "exp exp2 expm1 log log2 log10 log1p tanh sigmoid softmax log_softmax erf sin cos atan softplus nan_to_num round "
    "floor ceil trunc"
)
_RAISED = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}


def plain_name(func: Callable[..., Any]) -> str:
    """``mul`` for ``torch.mul``, ``Tensor.mul_``, ``Tensor.__imul__`` and ``torch._foreach_mul_``."""
    return plain(getattr(func, "__name__", ""))


@cache
def plain(name: str) -> str:
    """Gives the same of the name that a function has."""
    return str(name).removeprefix("_foreach_").strip("_").removeprefix("linalg_")


def bounds(name: str) -> bool:
    """Whether a function holds its operand against another: a threshold, as in clipping."""
    return name in _BOUNDS or name in _COMPARISONS or name == "rdiv"


def multiplies(name: str) -> bool:
    """Whether a function's result is the product of its operands."""
    return name in _PRODUCTS


def divides(name: str) -> bool:
    """Whether a function divides its first operand by its second."""
    return name in QUOTIENTS


def adds(name: str) -> bool:
    """Whether a function's result is the sum of terms."""
    return name in _SUMS


def of_result(name: str, args: Sequence[Any], kwargs: dict[str, Any], dependence_of: DependenceOf) -> ScaleDependence:
    """How a function's result depends on the loss scale.

    Args:
        name: The function's `plain_name`.
        args: Its arguments.
        kwargs: Its keyword arguments.
        dependence_of: How one argument depends on it; of a list, that of its first tensor that depends on the scale.
    """
    factors = [key for key in ("alpha", "value") if key in kwargs and adds(name)]  # of a term, and no terms themselves
    values = [*args, *(value for key, value in kwargs.items() if key not in ("out", *factors))]
    operands = [dependence_of(value) for value in values]
    factor = dependence_of(kwargs[factors[0]]) if factors else CONSTANT
    dependent = [each for each in (*operands, factor) if each != CONSTANT]
    if not dependent or name in _FREE:
        return CONSTANT
    if UNKNOWN in dependent:
        return UNKNOWN
    inhomogeneous = next((each for each in dependent if each.inhomogeneous), None)
    if inhomogeneous is not None:
        return ScaleDependence(inhomogeneous=inhomogeneous.inhomogeneous)
    result = _of_sum(name, values, operands, factor) if adds(name) else _of_homogeneous(name, values, operands)
    if abs(result.degree) == 1 and any(each.of_scale and abs(each.degree) == 2 for each in dependent):
        result = CONSTANT  # gradients of a squared loss: nobody saw the square, the loop divides it out
    if result.inhomogeneous or result.degree:
        return result._replace(of_scale=not result.inhomogeneous and all(each.of_scale for each in dependent))
    divided_out = any(each.of_scale for each in dependent) and not all(each.of_scale for each in dependent)
    return result._replace(unscaled=divided_out or any(each.unscaled for each in dependent))


def _of_homogeneous(name: str, values: list[Any], operands: list[ScaleDependence]) -> ScaleDependence:
    """The dependence where every operand is a power of the scale."""
    degree = _of_ratios(name, values, [each.degree for each in operands])
    if degree is not None:
        return ScaleDependence(degree)
    if name == "pow" or (name in _CURVES and operands[0].degree):
        return _ADDED
    return CONSTANT if name == "rdiv" or name in _CURVES else _of_equals(name, values, operands)


def _of_ratios(name: str, values: list[Any], degrees: list[float]) -> float | None:
    """The degree of products, quotients and fixed powers; None for everything else."""
    first, second = degrees[0], degrees[1] if len(degrees) > 1 else 0.0
    if name in _PRODUCTS:
        return sum(degrees)
    if name in QUOTIENTS:
        return first - second
    if name == "rdiv" and _matters(values[1]):  # an infinite number over the norm is how clipping is switched off
        return second - first
    exponent = values[1] if name == "pow" and len(values) > 1 else _RAISED.get(name)
    if isinstance(exponent, (int, float)):
        return first * exponent
    return first + degrees[2] if name.endswith("non_finite_check_and_unscale") else None


def _of_sum(name: str, values: list[Any], operands: list[ScaleDependence], factor: ScaleDependence) -> ScaleDependence:
    """The dependence of a sum: that of its terms, if they agree."""
    terms = _terms(name, [each.degree for each in operands], factor.degree)
    degrees = {degree for value, degree in zip(values, terms, strict=False) if _matters(value)}
    if len(degrees) > 1:
        return _ADDED
    return ScaleDependence(degrees.pop()) if degrees else CONSTANT


def _terms(name: str, degrees: list[float], factor: float) -> list[float]:
    """The degrees of the terms of a sum: of each operand, with what it is multiplied by."""
    first, second, third, fourth = (*degrees, 0.0, 0.0, 0.0)[:4]
    if name in ("addcmul", "addcdiv"):  # the factor is the fourth operand, or has its name
        return [first, second + (third if name == "addcmul" else -third) + fourth + factor]
    if name == "lerp":
        return [first, second, first + third]
    return [first + factor, second] if name == "rsub" else [first, second + factor]


def _of_equals(name: str, values: list[Any], operands: list[ScaleDependence]) -> ScaleDependence:
    """The dependence of what is compared or merely passed on: its operands' own, if they agree."""
    bounded = bounds(name) or (name in ("min", "max") and len(values) > 1 and isinstance(values[1], Tensor))
    if bounded:
        degrees = {each.degree for value, each in zip(values, operands, strict=True) if _matters(value)}
    else:
        degrees = {each.degree for value, each in zip(values, operands, strict=True) if _passes_on(value, each)}
    if len(degrees) > 1:
        return _BOUNDED if bounded else _ADDED
    return ScaleDependence(degrees.pop()) if degrees and name not in _COMPARISONS else CONSTANT


def _matters(value: Any) -> bool:
    """Whether the degree of an operand that is added or compared has to agree with the others'."""
    if isinstance(value, (int, float)):
        return _TINY < abs(value) < _HUGE and not isinstance(value, bool)
    return isinstance(value, (Tensor, list, tuple))


def _passes_on(value: Any, operand: ScaleDependence) -> bool:
    """Whether an operand that is passed on depends on the scale: shapes, masks and fillings do not."""
    return operand != CONSTANT and not isinstance(value, (int, float))
