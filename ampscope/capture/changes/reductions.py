"""These forms reduce without cancelling (variances), and over rows, targets or means of nothing."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ampscope.capture.changes.call_form import Call, CallForm, CallPlace, Compared, Followed
from ampscope.capture.changes.failure import FailedCall, name_of_op, operand, ops_after, ops_before, place_of_op
from ampscope.capture.torch_support.user_line import Place
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


#: Ops that fail on a variance that is negative or zero, and those by whose result one fails that overflows.
_READS = frozenset({"sqrt", "rsqrt", "pow", "log", "div", "reciprocal"})
_SQUARES = frozenset({"pow", "mul"})
_PASSED = frozenset({"_to_copy", "clone", "add", "mul", "clamp", "clamp_min", "sqrt"})


class _Is(Enum):
    """The relations of a tensor to the one that it was computed from."""

    SQUARE = auto()
    MEAN = auto()
    MEAN_OF_SQUARE = auto()
    SQUARE_OF_MEAN = auto()


class _Part(NamedTuple):
    kind: _Is
    of: Tensor
    along: tuple[Any, bool] = (None, False)  #: of a mean, the dimensions, and whether they are kept


_AFTER_MEAN = {None: _Is.MEAN, _Is.SQUARE: _Is.MEAN_OF_SQUARE}
_AFTER_SQUARE = {None: _Is.SQUARE, _Is.MEAN: _Is.SQUARE_OF_MEAN}


class Centred(CallForm):
    """``(x - x.mean()).square().mean()`` for ``x.square().mean() - x.mean().square()``.

    Args:
        parts: The lines that calculate the squares and the means.
    """

    form = Form.CENTRED

    def __init__(self, parts: frozenset[CallPlace]) -> None:
        super().__init__(frozenset({"sub"}))
        self._parts = parts
        self._known: Followed[_Part] = Followed()

    def release(self) -> None:
        """See `CallForm.release`."""
        self._known.clear()

    def fits(self, call: Call) -> bool:
        """See `CallForm.fits`."""
        return self._variance(call) is not None

    def follows(self, call: Call, place: Callable[[], Place]) -> bool:
        """See `CallForm.follows`."""
        made = call.name == "mean" or _is_square(call)
        return made and (self._known.reads(call) or any(each.is_at(place()) for each in self._parts))

    def saw(self, call: Call, result: Any) -> Iterable[Compared]:
        """See `CallForm.saw`."""
        given = call.operands[0] if call.operands else None
        if isinstance(given, Tensor):
            known = self._known.of(given)
            kinds = _AFTER_MEAN if call.name == "mean" else _AFTER_SQUARE
            kind = kinds.get(known.kind if known is not None else None)
            along = _along(call) if call.name == "mean" else known.along if known is not None else (None, False)
            if kind is not None and along is not None:
                self._known.note(result, _Part(kind, known.of if known is not None else given, along))
        return ()

    def instead(self, call: Call) -> Any:
        """See `CallForm.instead`."""
        part = self._variance(call)
        return NotImplemented if part is None else _centred(part.of, part)

    def good(self, before: Tensor) -> Tensor:
        """See `CallForm.good`: a variance below zero was not."""
        return before.isfinite() & (before >= 0)

    def compared(self, call: Call, result: Any) -> Iterable[Compared]:
        """See `CallForm.compared`: what the code means is known better than it was computed.

        Where numbers are rounded by one unit of eps, their variance moves by as many as they are larger than their
        deviation.
        """
        part = self._variance(call)
        if part is None:
            return ()
        exact = _centred(part.of.double(), part)
        larger = (_mean_along(part.of.double().square(), *part.along) / exact).sqrt()
        return (Compared(call(), result, exact, condition=larger.nan_to_num(nan=1.0, posinf=1.0).clamp_min(1.0)),)

    def _variance(self, call: Call) -> _Part | None:
        """Returns the tensor of which a difference is the variance, and along what; None where none is known."""
        if len(call.operands) != 2 or call.kwargs:
            return None
        squares, mean = map(self._known.of, call.operands)
        if squares is None or mean is None or squares.of is not mean.of or squares.along != mean.along:
            return None
        return squares if (squares.kind, mean.kind) == (_Is.MEAN_OF_SQUARE, _Is.SQUARE_OF_MEAN) else None


def _is_square(call: Call) -> bool:
    """Whether a call squares one tensor."""
    if call.name == "square":
        return True
    one, other = (*call.operands[:2], None, None)[:2]
    return (call.name == "pow" and not isinstance(other, Tensor) and other == 2) or (
        call.name == "mul" and one is other
    )


def _along(call: Call) -> tuple[Any, bool] | None:
    """The dimensions of a mean, and whether they are kept; None where it is given more than that."""
    named = dict(zip(("dim", "keepdim"), call.args[1:], strict=False)) | {
        {"axis": "dim"}.get(each, each): value for each, value in call.kwargs.items()
    }
    dims = named.get("dim")
    known = named.keys() <= {"dim", "keepdim"} and len(call.args) <= 3
    return (tuple(dims) if isinstance(dims, list) else dims, bool(named.get("keepdim", False))) if known else None


def _mean_along(given: Tensor, dims: Any, keeps: bool) -> Tensor:
    return given.mean() if dims is None else given.mean(dims, keeps)


def _centred(given: Tensor, part: _Part) -> Tensor:
    dims, _ = part.along
    return _mean_along((given - _mean_along(given, dims, True)).square(), *part.along)


def of_variance(call: FailedCall) -> Iterator[CallForm]:
    """The variance that a failed op reads, or of which it is the square, by centred squares."""
    near = ops_after(call, call.seq, _PASSED | {"mean"}) if call.name in _SQUARES else iter(())
    behind = ops_before(call, call.seq, _PASSED) if call.name in _READS else iter(())
    for seq in (*near, *behind):
        parts = _parts(call, seq) if name_of_op(call, seq) == "sub" else []
        low = call.graph.output(seq).min
        if parts and (call.name in _SQUARES or low is None or not low > 0):
            form = Centred(frozenset(place_of_op(call, each) for each in parts))
            form.at = place_of_op(call, seq)
            yield form
            return


def _parts(call: FailedCall, difference: int) -> list[int]:
    """The squares and means of which a difference makes the variance; empty where it is something else."""
    first, second = (_reads(call, difference, arg) for arg in (0, 1))
    if first is None or second is None or name_of_op(call, first) != "mean" or not _squares(call, second):
        return []
    square, mean = _reads(call, first, 0), _reads(call, second, 0)
    if square is None or mean is None or not _squares(call, square) or name_of_op(call, mean) != "mean":
        return []
    return [first, second, square, mean] if _reads(call, square, 0) == _reads(call, mean, 0) else []


def _reads(call: FailedCall, seq: int, arg: int) -> int | None:
    """The op that gave an operand, before a cast."""
    found = next((edge.from_seq for edge in call.graph.inputs[seq] if edge.arg == arg), None)
    return _reads(call, found, 0) if found is not None and name_of_op(call, found) == "_to_copy" else found


def _squares(call: FailedCall, seq: int) -> bool:
    if name_of_op(call, seq) == "pow":
        return call.graph.scalars(seq).get("exponent") == 2
    return name_of_op(call, seq) == "mul" and _reads(call, seq, 0) == _reads(call, seq, 1) is not None
