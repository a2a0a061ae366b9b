"""How a result grows with the loss scale, given how its operands do.

A value that is proportional to the scale has degree 1 (a scaled gradient, its norm), its square 2, a ratio of two such
values 0. What is bounded by a constant, or added to one, is no power of the scale at all: with another scale it
would be another value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ampscope.trace.vocabulary import Cause


class Power(NamedTuple):
    """How a value depends on the loss scale."""

    degree: float = 0.0
    mixed: Cause | None = None  #: no power of the scale; what it is called to put such a value into a gradient
    of_scale: bool = False  #: made of the scale and constants alone
    unscaled: bool = False  #: was scaled, and the scale was divided out


CONSTANT = Power()
SCALED = Power(1.0)

_BOUNDED = Power(mixed=Cause.MISUSE_CLIP_BEFORE_UNSCALE)
_ADDED = Power(mixed=Cause.MISUSE_NO_UNSCALE)

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
_QUOTIENTS = _words("div divide true_divide idiv")
_SUMS = _words("add iadd sub isub subtract rsub lerp hypot addcmul addcdiv")
_BOUNDS = _words("clamp clip clamp_min clamp_max minimum maximum fmin fmax hardtanh renorm threshold")
_CURVES = _words(
    "exp exp2 expm1 log log2 log10 log1p tanh sigmoid softmax log_softmax erf sin cos atan softplus nan_to_num round "
    "floor ceil trunc"
)
_RAISED = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}


def plain_name(func: Callable[..., Any]) -> str:
    """``mul`` for ``torch.mul``, ``Tensor.mul_``, ``Tensor.__imul__`` and ``torch._foreach_mul_``."""
    name = str(getattr(func, "__name__", ""))
    return name.removeprefix("_foreach_").strip("_").removeprefix("linalg_")


def bounds(name: str) -> bool:
    """Whether a function holds its operand against another: a threshold, as in clipping."""
    return name in _BOUNDS or name in _COMPARISONS or name == "rdiv"


def combined(name: str, args: Sequence[Any], kwargs: dict[str, Any], power_of: Callable[[Any], Power]) -> Power:
    """The power of a function's result.

    Args:
        name: The function's `plain_name`.
        args: Its arguments.
        kwargs: Its keyword arguments.
        power_of: The power of one argument; of a list, that of its first tensor that depends on the scale.
    """
    values = [*args, *(value for key, value in kwargs.items() if key != "out")]
    powers = [power_of(value) for value in values]
    told = [power for power in powers if power != CONSTANT]
    if not told or name in _FREE:
        return CONSTANT
    mixed = next((power for power in told if power.mixed), None)
    if mixed is not None:
        return Power(mixed=mixed.mixed)
    power = _of_pure(name, values, powers)
    if power.mixed or power.degree:
        return power._replace(of_scale=not power.mixed and all(each.of_scale for each in told))
    divided_out = any(each.of_scale for each in told) and not all(each.of_scale for each in told)
    return power._replace(unscaled=divided_out or any(each.unscaled for each in told))


def _of_pure(name: str, values: list[Any], powers: list[Power]) -> Power:
    """The power where every operand is a power of the scale."""
    degree = _of_ratios(name, values, [power.degree for power in powers])
    if degree is not None:
        return Power(degree)
    if name == "pow" or (name in _CURVES and powers[0].degree):
        return _ADDED
    return CONSTANT if name == "rdiv" or name in _CURVES else _of_alike(name, values, powers)


def _of_ratios(name: str, values: list[Any], degrees: list[float]) -> float | None:
    """The degree of products, quotients and fixed powers; None for everything else."""
    first, second = degrees[0], degrees[1] if len(degrees) > 1 else 0.0
    if name in _PRODUCTS:
        return sum(degrees)
    if name in _QUOTIENTS:
        return first - second
    if name == "rdiv" and _matters(values[1]):  # an infinite number over the norm is how clipping is switched off
        return second - first
    exponent = values[1] if name == "pow" and len(values) > 1 else _RAISED.get(name)
    if isinstance(exponent, (int, float)):
        return first * exponent
    return first + degrees[2] if name.endswith("non_finite_check_and_unscale") else None


def _of_alike(name: str, values: list[Any], powers: list[Power]) -> Power:
    """The power of what is added, compared or merely passed on: its operands' own, if they agree."""
    bounded = bounds(name) or (name in ("min", "max") and len(values) > 1 and isinstance(values[1], Tensor))
    if bounded or name in _SUMS:
        degrees = {power.degree for value, power in zip(values, powers, strict=True) if _matters(value)}
    else:
        degrees = {power.degree for value, power in zip(values, powers, strict=True) if _is_float(value, power)}
    if len(degrees) > 1:
        return _BOUNDED if bounded else _ADDED
    return Power(degrees.pop()) if degrees and name not in _COMPARISONS else CONSTANT


def _matters(value: Any) -> bool:
    """Whether the degree of an operand that is added or compared has to agree with the others'."""
    if isinstance(value, (int, float)):
        return _TINY < abs(value) < _HUGE and not isinstance(value, bool)
    return isinstance(value, (Tensor, list, tuple))


def _is_float(value: Any, power: Power) -> bool:
    """Whether an operand that is passed on depends on the scale: shapes, masks and fillings do not."""
    return power != CONSTANT and not isinstance(value, (int, float))
