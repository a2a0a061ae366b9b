"""Forms for what is empty: rows without a key, targets without an alignment, means over nothing."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ampscope.capture.replay.cures.forms.call_form import Call, CallForm, Compared
from ampscope.capture.replay.cures.forms.failed_call import FailedCall
from ampscope.capture.replay.cures.forms.mathematics.operands import operand
from ampscope.trace.schema import Form

_SOFTMAXES = frozenset({"softmax", "log_softmax"})
_ATTENTION = "scaled_dot_product_attention"
_HEADS = "multi_head_attention_forward"
#: Where ``zero_infinity`` stands among the arguments of a CTC loss.
_ZERO_INFINITY = 6
#: Places of a tensor and a dimension among the arguments of a deviation.
_UNBIASED = 2
DEVIATIONS = frozenset({"std", "var", "std_mean", "var_mean"})
_LOSSES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"})
_BY_TARGET = frozenset({"cross_entropy", "nll_loss"})


class KeptRows(CallForm):
    """A softmax, or an attention, whose rows without a single key are zero."""

    form = Form.KEPT_ROWS

    def __init__(self) -> None:
        super().__init__(_SOFTMAXES | {_ATTENTION, _HEADS})

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        if call.name in _SOFTMAXES:
            return _softmax(call)
        return _attention(call) if call.name == _ATTENTION else _heads(call)

    def compared(self, call: Call, result: Any) -> Iterable[Compared]:
        """See `CallForm.compared`: of what attention returns, its output."""
        first = result[0] if isinstance(result, tuple) else result
        before = call()
        return (Compared(before[0] if isinstance(before, tuple) else before, first),)


def _softmax(call: Call) -> Any:
    """Makes rows of nothing but -inf zero: before the softmax, and after it."""
    given, dim = call.operands[0], call.kwargs.get("dim", next(iter(call.args[1:]), None))
    if not isinstance(given, Tensor) or not isinstance(dim, int):
        return NotImplemented
    empty = (given == -math.inf).all(dim, keepdim=True)
    return call.with_operand(0, given.masked_fill(empty, 0.0))().masked_fill(empty, 0.0)


def _attention(call: Call) -> Any:
    """Makes rows zero that the mask leaves without a key (False or -inf), in ``scaled_dot_product_attention``."""
    mask = call.kwargs.get("attn_mask", next(iter(call.args[3:]), None))
    if not isinstance(mask, Tensor):
        return NotImplemented
    empty = (~mask if mask.dtype is torch.bool else mask == -math.inf).all(-1, keepdim=True)
    kept = mask | empty if mask.dtype is torch.bool else mask.masked_fill(empty, 0.0)
    kwargs = {name: value for name, value in call.kwargs.items() if name != "attn_mask"}
    args = (*call.args[:3], kept, *call.args[4:])
    return call._replace(args=args, kwargs=kwargs)().masked_fill(empty, 0.0)


def _heads(call: Call) -> Any:
    """Makes batches zero all of whose keys are padding, in ``nn.MultiheadAttention``."""
    padding = call.kwargs.get("key_padding_mask")
    if not isinstance(padding, Tensor) or padding.dim() != 2:
        return NotImplemented
    empty = (padding if padding.dtype is torch.bool else padding == -math.inf).all(-1)
    kept = padding.masked_fill(empty[:, None], False if padding.dtype is torch.bool else 0.0)
    output, *others = call._replace(kwargs={**call.kwargs, "key_padding_mask": kept})()
    return (output.masked_fill(empty[None, :, None], 0.0), *others)


class ZeroInfinity(CallForm):
    """A CTC loss that is zero where there is no alignment."""

    form = Form.ZERO_INFINITY

    def __init__(self) -> None:
        super().__init__(frozenset({"ctc_loss"}))

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        kwargs = {**call.kwargs, "zero_infinity": True}
        return call._replace(args=call.args[:_ZERO_INFINITY], kwargs=kwargs)()


class MeanOfNothing(CallForm):
    """A mean that divides by one where there is nothing to divide by."""

    form = Form.OPERAND_BOUND

    def __init__(self) -> None:
        super().__init__(_LOSSES | _BY_TARGET | {"mean"}, value=1.0)

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        if call.name == "mean":
            return _mean(call)
        return _loss(call) if call.name in _LOSSES else _loss_by_target(call)


def _mean(call: Call) -> Any:
    given = call.operands[0]
    if not isinstance(given, Tensor) or given.numel() or not given.is_floating_point():
        return NotImplemented
    return torch.sum(*call.args, **call.kwargs)


def _loss(call: Call) -> Any:
    """Takes the sum over no elements in the place of their mean, for a loss that is a mean over all of them."""
    given = call.operands[0]
    if call.kwargs.get("reduction", "mean") != "mean" or not isinstance(given, Tensor) or given.numel():
        return NotImplemented
    return call._replace(kwargs={**call.kwargs, "reduction": "sum"})()


def _loss_by_target(call: Call) -> Any:
    """Divides the sum over the targets that are not ignored by their weight, or by one where that is zero."""
    bound = inspect.signature(getattr(functional, call.name)).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    target, weight = given["target"], given["weight"]
    if given["reduction"] != "mean" or target.is_floating_point() or given.get("label_smoothing"):
        return NotImplemented
    counted = target != given["ignore_index"]
    each = counted if weight is None else weight[target.where(counted, torch.zeros_like(target))] * counted
    total = each.sum()
    summed = call._replace(args=(), kwargs={**given, "reduction": "sum"})()
    return summed / torch.where(total == 0, torch.ones_like(total), total)


class DeviationOfOne(CallForm):
    """A deviation, or a variance, of a single value that is zero; of more it is what it was."""

    form = Form.OPERAND_BOUND

    def __init__(self) -> None:
        super().__init__(DEVIATIONS, argument=0, value=1.0)

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        given = call.operands[0]
        if not isinstance(given, Tensor) or call.kwargs.keys() & {"unbiased", "correction", "out"}:
            return NotImplemented
        dim = call.kwargs.get("dim", next(iter(call.args[1:]), None))
        if isinstance(dim, bool) or len(call.args) > _UNBIASED:
            return NotImplemented
        dims = range(given.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
        if math.prod(given.shape[each] for each in dims) != 1:
            return NotImplemented
        return call._replace(kwargs={**call.kwargs, "correction": 0})()


def of_softmax(call: FailedCall) -> Iterator[CallForm]:
    """Rows that a mask leaves without a key, zero."""
    attention = "softmax" in call.name or "scaled_dot_product" in call.name
    ends = [operand(call, number) for number in range(len(call.site.in_dtypes))] if attention else []
    if any(each is not None and each.low == -math.inf for each in ends):
        yield KeptRows()


def of_ctc(call: FailedCall) -> Iterator[CallForm]:
    """Targets without an alignment left out of the loss."""
    if "ctc_loss" in call.name:
        yield ZeroInfinity()


def of_deviation(call: FailedCall) -> Iterator[CallForm]:
    """A deviation of a single value that is zero."""
    if call.name in DEVIATIONS and not call.in_backward:
        yield DeviationOfOne()


def of_mean(call: FailedCall) -> Iterator[CallForm]:
    """A mean over nothing that is zero."""
    nothing = "0" in next(iter(call.site.in_shapes), "").split("x")
    if call.name.startswith("nll_loss") or (nothing and call.name in _LOSSES | {"mean"}):
        yield MeanOfNothing()
