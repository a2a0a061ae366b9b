"""These forms keep operands away from where an op is not defined, or infinite, or has no finite slope."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.changes.call_form import Call, CallForm, OperandBound
from ampscope.capture.changes.failure import (
    REACH,
    FailedCall,
    Operand,
    is_masked,
    name_of_op,
    operand,
    power_of_ten,
    smallest_normal,
)
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import Form, Phase

LOGARITHMS = frozenset({"log", "log2", "log10"})
ROOTS = frozenset({"sqrt", "rsqrt", "pow"})
#: Ops that divide, by the operand that is the divisor.
DIVISORS = {"div": 1, "true_divide": 1, "reciprocal": 0, "rsqrt": 0}
#: Functions that code may call where such an op runs.
DIVISIONS = frozenset({"div", "reciprocal", "rsqrt"})
#: Functions that are defined between -1 and 1, with an infinite slope or value there, by how code may call them too.
ENDING = {"acos": "arccos", "asin": "arcsin", "atanh": "arctanh", "erfinv": "special_erfinv"}
#: How far beyond 1 an operand may be by rounding, in units of its dtype's eps.
_ROUNDED = 8.0
_EXPONENTIALS = {"exp": 1.0, "expm1": 1.0, "exp2": math.log(2.0)}
#: A bound that does not make large what is divided by it, by dtype.
_USUAL = {"float16": 1e-4}
_OF_OTHERS = 1e-6
#: The largest bound of a divisor whose values that are not zero lie well above it.
_LARGER = 1e-2


class DivisorBound(OperandBound):
    """A divisor that is bounded from below; of a quotient it is the second operand."""

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        self.argument = int(call.name == "div")
        return super().instead(call) if len(call.operands) > self.argument else NotImplemented


class EndsBound(OperandBound):
    """An operand that is kept from 1 and from -1."""

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        operand, most = call.operands[0], self.value or 0.0
        return call.with_operand(0, operand.clamp(-most, most))() if isinstance(operand, Tensor) else NotImplemented

    def before(self, call: Call) -> Any:
        """See `CallForm.before`: without what the bound is for."""
        operand = call.operands[0]
        return call().masked_fill(operand.abs() > (self.value or 0.0), math.nan)


class AddedEps(CallForm):
    """A constant that is added to an operand."""

    form = Form.ADDED_EPS

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        number = self.argument or 0
        value = call.operands[number]
        return call.with_operand(number, value + (self.value or 0.0))() if isinstance(value, Tensor) else NotImplemented


def bound_of_logarithm(call: FailedCall) -> Iterator[CallForm]:
    """The operand of a logarithm kept away from zero, by a normal number of its dtype."""
    given = operand(call, 0) if call.name in LOGARITHMS else None
    if given is not None and given.dtype in FINFO:
        yield OperandBound(frozenset({call.name}), 0, smallest_normal(given.dtype), lowest=True)


def bound_of_division(call: FailedCall) -> Iterator[CallForm]:
    """A divisor that has no sign kept away from zero."""
    given = operand(call, DIVISORS[call.name]) if call.name in DIVISORS else None
    if given is None or given.is_negative:
        return
    whole = given.dtype not in FINFO  # a count
    value = 1.0 if whole else _usual(given)
    bound = DivisorBound(DIVISIONS, DIVISORS[call.name], value, lowest=True)
    larger = 0.0 if whole or given.smallest is None else min(_LARGER, power_of_ten(given.smallest) / 10)
    if larger > value:
        bound.milder = DivisorBound(DIVISIONS, DIVISORS[call.name], larger, lowest=True)
    yield bound


def bound_of_negative_root(call: FailedCall) -> Iterator[CallForm]:
    """The operand of a root kept from being negative; then also from zero, where the slope is infinite."""
    given = operand(call, 0) if call.name in ROOTS and not call.in_backward else None
    exponent = call.graph.scalars(call.seq).get("exponent", 0.5)
    fraction = isinstance(exponent, float) and not exponent.is_integer()
    if given is None or given.dtype not in FINFO or not given.is_negative or not fraction:
        return
    if call.name != "rsqrt" and exponent > 0:
        yield OperandBound(frozenset({call.name}), 0, 0.0, lowest=True)
    yield OperandBound(frozenset({call.name}), 0, _usual(given), lowest=True)


def bound_of_ends(call: FailedCall) -> Iterator[CallForm]:
    """The operand of a function that ends at 1 and at -1 kept from there, unless it is beyond by more than rounding."""
    given = operand(call, 0) if call.name in ENDING else None
    if given is None or given.dtype not in FINFO or given.low is None or given.high is None:
        return
    eps = FINFO[given.dtype].eps
    if max(-given.low, given.high) <= 1 + _ROUNDED * eps:
        calls = frozenset({call.name, ENDING[call.name]})
        yield EndsBound(calls, 0, 1 - max(eps, _OF_OTHERS), lowest=False)


def bound_of_slope(call: FailedCall) -> Iterator[CallForm]:
    """A constant under the root whose slope is infinite at zero."""
    given = operand(call, 0) if call.name in ("sqrt", "pow") and call.in_backward else None
    if given is not None and given.dtype in FINFO and not given.is_negative:
        yield AddedEps(frozenset({call.name}), argument=0, value=_USUAL.get(given.dtype, _OF_OTHERS))


def bound_of_exponential(call: FailedCall) -> Iterator[CallForm]:
    """The exponent kept below the logarithm of the largest number that products and sums of the power still hold."""
    dtype = next(iter(call.site.out_dtypes), "")
    if call.name in _EXPONENTIALS and dtype in FINFO and not call.in_backward:
        most = math.log(FINFO[dtype].max) - math.log(_growth(call, call.seq, REACH))
        largest = math.floor(most / _EXPONENTIALS[call.name])
        yield OperandBound(frozenset({call.name}), 0, float(largest), lowest=False)


def _growth(call: FailedCall, seq: int, reach: int) -> float:
    """How many times larger the products and sums that read an op's result make it, at the most; at least 1."""
    readers = {edge.seq for edge in call.graph.readers[seq] if call.graph.site(edge.seq).phase != Phase.BACKWARD}
    grown = [_factor(call, each, seq) * _growth(call, each, reach - 1) for each in readers if reach]
    return max([1.0, *grown])


def _factor(call: FailedCall, seq: int, given: int) -> float:
    """How many times larger an op makes what one gave; 0 for another kind of op."""
    kind = name_of_op(call, seq)
    if kind in ("sum", "mean"):
        return call.graph.output(given).numel / max(1, call.graph.output(seq).numel)
    if kind != "mul":
        return float(kind == "_to_copy")
    others = [
        call.graph.output(edge.from_seq, edge.from_out) for edge in call.graph.inputs[seq] if edge.from_seq != given
    ]
    number = call.graph.scalars(seq).get("other")
    ends = [end for row in others for end in (row.min, row.max) if end is not None]
    known = [abs(end) for end in (*ends, number) if isinstance(end, (int, float)) and math.isfinite(end)]
    return max(known, default=1.0)


def _usual(given: Operand) -> float:
    """A bound by which can be divided, below all of an operand's values that are not zero, and a normal number."""
    value = _USUAL.get(given.dtype, _OF_OTHERS)
    if given.smallest is None or given.smallest >= value or given.is_negative:
        return value
    return max(power_of_ten(given.smallest), smallest_normal(given.dtype))


_SLOPES = frozenset({"sqrt", "pow"})


class SafeWhere(CallForm):
    """An op whose operand is 1 wherever the op is not defined for it.

    Attributes:
        keeps: What the op gives there stays, without a slope.

    Args:
        calls: Which functions.
        keeps: What the op gives there stays, without a slope: for what is defined there.
    """

    form = Form.SAFE_WHERE

    def __init__(self, calls: frozenset[str], *, keeps: bool) -> None:
        super().__init__(calls, argument=0, value=1.0)
        self.keeps = keeps

    @property
    def unsafe(self) -> str:
        """The operands for which 1 is put in, in words."""
        return "zero" if self.calls == DIVISIONS else "not above zero"

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        number = int(call.name == "div")
        if len(call.operands) <= number or not isinstance(call.operands[number], Tensor):
            return NotImplemented
        self.argument = number
        given = call.operands[number]
        unsafe = given == 0 if call.name in ("div", "reciprocal") else given <= 0
        result = call.with_operand(number, torch.where(unsafe, torch.ones_like(given), given))()
        return (
            torch.where(unsafe, call.with_operand(number, given.detach())().detach(), result) if self.keeps else result
        )


def safe_where_masked(call: FailedCall) -> Iterator[CallForm]:
    """The operand made safe before the op, where ``torch.where`` makes its result safe after it."""
    if call.name in LOGARITHMS | DIVISORS.keys() and is_masked(call):
        yield SafeWhere(DIVISIONS if call.name in DIVISORS else frozenset({call.name}), keeps=False)


def safe_where_sloped(call: FailedCall) -> Iterator[CallForm]:
    """A root without a slope at zero, where its own is infinite."""
    if call.name in _SLOPES and call.in_backward:
        yield SafeWhere(frozenset({call.name}), keeps=True)


def safe_where_divided(call: FailedCall) -> Iterator[CallForm]:
    """A divisor of both signs that is 1 instead of 0."""
    given = operand(call, DIVISORS[call.name]) if call.name in ("div", "true_divide", "reciprocal") else None
    if given is not None and given.is_negative and given.high is not None and not is_masked(call):
        yield SafeWhere(DIVISIONS, keeps=False)
