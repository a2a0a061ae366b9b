"""An op on an operand that is safe where the op is not defined, or has no finite slope."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.replay.cures.forms.call_form import Call, CallForm
from ampscope.capture.replay.cures.forms.failed_call import FailedCall
from ampscope.capture.replay.cures.forms.mathematics.bounds import DIVISIONS, DIVISORS, LOGARITHMS
from ampscope.capture.replay.cures.forms.mathematics.operands import is_masked, operand
from ampscope.trace.schema import Form

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


def of_masked(call: FailedCall) -> Iterator[CallForm]:
    """The operand made safe before the op, where ``torch.where`` makes its result safe after it."""
    if call.name in LOGARITHMS | DIVISORS.keys() and is_masked(call):
        yield SafeWhere(DIVISIONS if call.name in DIVISORS else frozenset({call.name}), keeps=False)


def of_slope(call: FailedCall) -> Iterator[CallForm]:
    """A root without a slope at zero, where its own is infinite."""
    if call.name in _SLOPES and call.in_backward:
        yield SafeWhere(frozenset({call.name}), keeps=True)


def of_division(call: FailedCall) -> Iterator[CallForm]:
    """A divisor of both signs that is 1 instead of 0."""
    given = operand(call, DIVISORS[call.name]) if call.name in ("div", "true_divide", "reciprocal") else None
    if given is not None and given.is_negative and given.high is not None and not is_masked(call):
        yield SafeWhere(DIVISIONS, keeps=False)
