"""Exponentials whose maximum is taken off, where what comes of them is divided by their sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.replay.cures.forms.call_form import Call, CallForm, Compared
from ampscope.capture.replay.cures.forms.failed_call import FailedCall
from ampscope.capture.replay.cures.forms.mathematics.followed import Followed
from ampscope.capture.replay.cures.forms.mathematics.operands import after, before, name, place
from ampscope.capture.torch_support.user_line import Place
from ampscope.trace.schema import Form

_PASSES = frozenset({"_to_copy", "mul", "add", "clamp", "clamp_min", "where", "masked_fill"})
_FAILS = frozenset({"exp", "exp2", "sum", "div"})


class _AsWritten(NamedTuple):
    """The values that a tensor would have without the change."""

    before: Tensor
    exact: Tensor  #: in float64


class MaxOff(CallForm):
    """``exp(x - x.max())`` for ``exp(x)``; good values are compared where it has been divided by its sum.

    Args:
        dims: Over which it is summed; None for all.
        beside: The number that the sum is added to or kept above, with which the quotient is another one.
    """

    form = Form.MAX_OFF

    def __init__(self, dims: tuple[int, ...] | None, beside: float | None = None) -> None:
        super().__init__(frozenset({"exp", "exp2"}), argument=0, was=beside)
        self._dims = dims
        self._known: Followed[_AsWritten] = Followed()
        self._condition: Tensor | float = 1.0

    def release(self) -> None:
        """See `CallForm.release`."""
        self._known.clear()

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        given = call.operands[0]
        if not isinstance(given, Tensor):
            return NotImplemented
        dims = tuple(range(given.dim())) if self._dims is None else self._dims
        largest = given.detach().amax(dims, keepdim=True)
        return call.with_operand(0, given - torch.where(largest.isfinite(), largest, torch.zeros_like(largest)))()

    def compared(self, call: Call, result: Any) -> Iterable[Compared]:
        """See `CallForm.compared`: it gives another multiple of what it gave; that is seen to later.

        Where its operand is rounded by one unit of eps, an exponential moves by as many as the operand is large.
        """
        self._condition = call.operands[0].abs().nan_to_num(posinf=0.0).amax().clamp_min(1.0).double()
        exact = call.with_operand(0, call.operands[0].double())()
        self._known.note(result, _AsWritten(call(), exact))
        return ()

    def follows(self, call: Call, place: Callable[[], Place]) -> bool:
        """See `CallForm.follows`."""
        return self._known.reads(call)

    def saw(self, call: Call, result: Any) -> Iterable[Compared]:
        """See `CallForm.saw`."""
        as_written = [known.before if (known := self._known.of(each)) is not None else each for each in call.args]
        exact = [known.exact if (known := self._known.of(each)) is not None else each for each in call.args]
        if isinstance(result, Tensor) and call.name != "backward":
            was, meant = call._replace(args=tuple(as_written))(), call._replace(args=tuple(exact))()
            if call.name == "div":
                return (Compared(was, result, meant, condition=self._condition),)
            self._known.note(result, _AsWritten(was, meant))
        return ()


def of_quotient(call: FailedCall) -> Iterator[CallForm]:
    """The maximum taken off what is exponentiated, summed and divided by that sum."""
    if call.name not in _FAILS or call.in_backward:
        return
    exponential = next((seq for seq in _itself_and_before(call) if name(call, seq) in ("exp", "exp2")), None)
    if exponential is None:
        return
    total = next((seq for seq in after(call, exponential, _PASSES) if name(call, seq) == "sum"), None)
    if total is None or not _divides(call, exponential, total):
        return
    dims = call.graph.scalars(total).get("dim")
    form = MaxOff(tuple(dims) if isinstance(dims, list) else None, _beside(call, total))
    form.at = place(call, exponential)
    yield form


def _beside(call: FailedCall, total: int) -> float | None:
    """The number that a sum is added to, or kept above, on its way to the quotient; None where there is none."""
    bounds = (seq for seq in after(call, total, _PASSES - {"mul"}) if name(call, seq) in ("add", "clamp", "clamp_min"))
    given = (call.graph.scalars(seq).get(key) for seq in bounds for key in ("other", "min"))
    return next((float(each) for each in given if isinstance(each, (int, float)) and each), None)


def _itself_and_before(call: FailedCall) -> Iterator[int]:
    yield call.seq
    yield from before(call, call.seq, _PASSES | {"sum", "div"})


def _divides(call: FailedCall, exponential: int, total: int) -> bool:
    """Whether what comes of the exponential is divided by what comes of its sum."""
    parts = {exponential, *after(call, exponential, _PASSES)}
    sums = {total, *after(call, total, _PASSES)}
    for seq in after(call, total, _PASSES):
        if name(call, seq) == "div":
            operands = {edge.arg: edge.from_seq for edge in call.graph.inputs[seq]}
            if operands.get(0) in parts - sums and operands.get(1) in sums:
                return True
    return False
