"""Calls that write their result into a tensor (``out=``, in place): a form writes it there, or is not that call's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampscope.capture.changes.replaced_calls import OtherForm
from ampscope.capture.torch_support.user_line import Place
from ampscope.cures.call_form import Call, CallForm, CallPlace
from ampscope.cures.forms.bounds import DivisorBound, EndsBound, OperandBound
from ampscope.cures.forms.constants import Constant
from ampscope.cures.forms.float32 import Float32Call
from ampscope.cures.forms.safe_where import SafeWhere

VALUES = torch.tensor([0.0, 0.25, 1.0])
LOG = frozenset({"log"})
ROOT = frozenset({"sqrt"})
HERE = CallPlace("", 1)

Made = tuple[CallForm, Callable[..., Tensor], tuple[Tensor | float, ...], Tensor]
BOUNDED: list[Made] = [
    (OperandBound(LOG, 0, 0.5, lowest=True), torch.log, (VALUES,), VALUES.clamp(min=0.5).log()),
    (SafeWhere(LOG, keeps=False), torch.log, (VALUES,), VALUES.clamp(min=0.0).masked_fill(VALUES == 0, 1.0).log()),
    (SafeWhere(ROOT, keeps=True), torch.sqrt, (VALUES,), VALUES.sqrt()),
    (EndsBound(frozenset({"acos"}), 0, 0.5, lowest=False), torch.acos, (VALUES,), VALUES.clamp(max=0.5).acos()),
    (
        DivisorBound(frozenset({"div"}), 1, 0.5, lowest=True),
        torch.div,
        (1.0 + VALUES, VALUES),
        (1 + VALUES) / VALUES.clamp(min=0.5),
    ),
    (Constant(1e-8, 0.5, HERE, None), torch.clamp, (VALUES, 1e-8), VALUES.clamp(0.5)),
    (Float32Call(LOG), torch.log, (VALUES.half(),), VALUES.log()),
]


def made(form: CallForm, call: Call) -> tuple[Tensor, OtherForm]:
    """What a call gives in a replay with a form."""
    change = OtherForm(form, HERE)
    with change.active(lambda: Place(None, HERE.line), torch.no_grad):
        result: Tensor = call()
    return result, change


@pytest.mark.parametrize(("form", "function", "given", "wanted"), BOUNDED)
def test_out_holds_what_the_form_gives(
    form: CallForm, function: Callable[..., Tensor], given: tuple[Tensor | float, ...], wanted: Tensor
) -> None:
    out = torch.full((3,), -7.0)
    result, change = made(form, Call(function, given, {"out": out}))
    assert change.used is not None
    assert result is out
    assert torch.equal(out, wanted)


def test_out_of_another_shape_is_left_to_the_call_itself() -> None:
    out = torch.empty(0)
    result, change = made(OperandBound(LOG, 0, 0.5, lowest=True), Call(torch.log, (VALUES,), {"out": out}))
    assert change.used is None
    assert torch.equal(result, VALUES.log())


IN_PLACE: list[tuple[CallForm, Callable[..., Tensor], tuple[float, ...]]] = [
    (OperandBound(LOG, 0, 0.5, lowest=True), Tensor.log_, ()),
    (SafeWhere(ROOT, keeps=True), Tensor.sqrt_, ()),
    (DivisorBound(frozenset({"div"}), 1, 0.5, lowest=True), Tensor.div_, (2.0,)),
    (DivisorBound(frozenset({"div"}), 1, 0.5, lowest=True), Tensor.__itruediv__, (2.0,)),
    (Float32Call(frozenset({"pow", "square", "__ipow__"})), Tensor.__ipow__, (2.0,)),
]


@pytest.mark.parametrize(("form", "function", "given"), IN_PLACE)
def test_what_writes_over_its_operand_is_made_as_it_is_written(
    form: CallForm, function: Callable[..., Tensor], given: tuple[float, ...]
) -> None:
    operand, wanted = VALUES.clone(), VALUES.clone()
    function(wanted, *given)
    result, change = made(form, Call(function, (operand, *given), {}))
    assert change.used is None
    assert result is operand
    assert torch.equal(operand, wanted)


@pytest.mark.parametrize("function", [Tensor.clamp_, Tensor.add_])
def test_another_number_goes_into_a_call_in_place(function: Callable[..., Tensor]) -> None:
    operand, wanted = VALUES.clone(), VALUES.clone()
    function(wanted, 0.5)
    result, change = made(Constant(1e-8, 0.5, HERE, None), Call(function, (operand, 1e-8), {}))
    assert change.used is not None
    assert result is operand
    assert torch.equal(operand, wanted)
