"""Ends a replay before an accelerator is given an index, or a probability, that is out of range.

On the host that is an exception. On CUDA it is an assertion of the device's, after which no call of the process works
any more: not the training's either. What the loop itself has computed was in range; what a replay computes otherwise,
in another precision above all, need not be.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.dynamo import OwnMode
from ampscope.capture.torch_support.own_collectives import PLAIN
from ampscope.capture.tracing import operators
from ampscope.capture.tracing.light_statistics import extremes
from ampscope.capture.tracing.running_code import FunctionWatch
from ampscope.capture.tracing.tracer import Tracer

#: Device types on which nothing is asserted that an exception would not tell.
_RAISING = frozenset({"cpu", "meta", "mps"})
_ENDS = "which on this device ends the process"
_OUT_OF_RANGE = f"an index out of range, {_ENDS}"
_NO_PROBABILITY = f"what is no probability, {_ENDS}"
_UNTRUE = f"an assertion that does not hold, {_ENDS}"
_NOT_KNOWN = "integers that the step has computed, and one out of range may end the process on this device"
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
#: Ops besides those that torch calls pointwise which may read any integers.
_HARMLESS = frozenset(
    {
        *("_local_scalar_dense", "_to_copy", "_unique2", "all", "amax", "amin", "aminmax", "any", "argmax", "argmin"),
        *("argsort", "cat", "clone", "constant_pad_nd", "copy", "cummax", "cummin", "cumprod", "cumsum", "equal"),
        *("fill", "flip", "histc", "lift_fresh_copy", "masked_fill", "masked_select", "max", "mean", "median", "min"),
        *("nonzero", "prod", "roll", "slice_scatter", "sort", "split_with_sizes_copy", "stack", "std", "sum", "topk"),
        *("tril", "triu", "unique_consecutive", "where"),
    }
)


class OutOfRangeError(Exception):
    """Raised when what the replay computed would have ended the process, or might have."""


def can_assert(devices: Iterable[torch.device]) -> bool:
    """Whether any of these devices would end the process where the host raises an exception."""
    return any(device.type not in _RAISING for device in devices)


def guarded(devices: Iterable[torch.device], tracer: Tracer) -> AbstractContextManager[object]:
    """`DeviceAsserts` where one of ``devices`` needs it, above the tracer of the replay."""
    return DeviceAsserts(tracer.unseen, tracer.functions) if can_assert(devices) else contextlib.nullcontext()


class DeviceAsserts(OwnMode):
    """Active in a replay on an accelerator: looks at indices and probabilities, and waits for the device to do so.

    Integers that no float has a part in are those of the real step. Others may go into the ops that are known to
    take any, or whose range is known here; into no other.

    Args:
        unseen: Leaves what it computes out of the replay's trace.
        functions: Knows the function that is being called, for a trace below this mode.
    """

    def __init__(
        self, unseen: Callable[[], AbstractContextManager[None]], functions: FunctionWatch | None = None
    ) -> None:
        super().__init__()
        self._unseen = unseen
        self._functions = functions
        self._derived: dict[int, Any] = {}  #: by storage: integers that floats have a part in, known weakly

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not PLAIN.issuperset(types) and not torch_private.are_fake(types):
            if self._functions is not None:
                self._functions.unwraps = True  # no mode below hears of the wrapper itself
            return NotImplemented  # a wrapper subclass: its inner ops come by again
        operator = operators.describe(func)
        if operator.passes_through or torch_private.are_fake(types):
            return func(*args, **kwargs)
        operands = operators.operands(operator, args, kwargs)
        derived = [each for each in operands if self._is_derived(each)]
        with self._unseen():
            self._check(func, args, operands, derived)
        result = func(*args, **kwargs)
        if derived or any(each.is_floating_point() or each.is_complex() for each in operands):
            self._note(result if isinstance(result, (tuple, list)) else (result,))
            self._note(operators.written_tensors(operator, args, kwargs))
        return result

    def _check(self, func: Any, args: Any, operands: list[Tensor], derived: list[Tensor]) -> None:
        """Raises where the device would assert, or nobody knows whether it would.

        Raises:
            OutOfRangeError: It would, or nobody knows.
        """
        name = func._schema.name.removeprefix("aten::")
        base = name.removesuffix("_")
        for given, most in _probabilities(base, func._schema.overload_name, operands):
            if not _are_probabilities(given, most):
                raise OutOfRangeError(f"{name} was about to get {_NO_PROBABILITY}")
        if base == "_assert_async" and not bool(operands[0].all()):
            raise OutOfRangeError(f"{name} was about to get {_UNTRUE}")
        if not any(each.dtype in _INTEGERS for each in derived):
            return
        if base not in _RANGES:
            if not _takes_any(base, func):
                raise OutOfRangeError(f"{name} was about to get {_NOT_KNOWN}")
            return
        for index, low, high in _RANGES[base](*args):
            if index.dtype in _INTEGERS and index.numel() and not _within(index, low, high):
                raise OutOfRangeError(f"{name} was about to get {_OUT_OF_RANGE}")

    def _is_derived(self, tensor: Tensor) -> bool:
        if tensor.is_floating_point() or tensor.is_complex() or tensor.layout is not torch.strided:
            return False
        return torch_private.storage_key(tensor) in self._derived

    def _note(self, results: Iterable[Any]) -> None:
        for each in operators.flat_tensors(results):
            if not (each.is_floating_point() or each.is_complex()) and each.layout is torch.strided:
                self._derived[torch_private.storage_key(each)] = torch_private.storage_ref(each)


def _takes_any(base: str, func: Any) -> bool:
    """Whether an op takes any integers; a backward reads those that its forward was given."""
    return torch.Tag.pointwise in func.tags or base in _HARMLESS or base.endswith("_backward")


def _within(index: Tensor, low: int, high: int) -> bool:
    """Whether all of an index, which is not empty, is at least ``low`` and less than ``high``."""
    least, greatest = (int(end) for end in torch.aminmax(index))
    return low <= least and greatest < high


def _probabilities(base: str, overload: str, operands: list[Tensor]) -> Iterator[tuple[Tensor, float]]:
    """Yields the tensors that an op takes for probabilities, each with how large it may be."""
    if base == "multinomial":
        yield operands[0], math.inf
    elif base == "binary_cross_entropy":
        yield operands[0], 1.0
    elif base == "bernoulli" and overload not in ("p", "float"):
        yield operands[-1], 1.0


def _are_probabilities(tensor: Tensor, most: float) -> bool:
    low, high = map(float, extremes(tensor)) if tensor.numel() else (0.0, 0.0)
    return low >= 0.0 and high <= most and math.isfinite(high)


#: Integers that an op reads, with the least of what they may be and the end of it.
_Ranges = Iterator[tuple[Tensor, int, int]]


def _size(tensor: Tensor, dim: int) -> int:
    return tensor.size(dim) if tensor.dim() else 1


def _along(tensor: Tensor, dim: int, index: Tensor, *_: Any) -> _Ranges:
    yield index, 0, _size(tensor, dim)


def _rows(weight: Tensor, index: Tensor, offsets: Any = None, *_: Any) -> _Ranges:
    yield index, 0, weight.size(0)
    if isinstance(offsets, Tensor):
        yield offsets, 0, index.numel() + 1


def _renormed(weight: Tensor, index: Tensor, *_: Any) -> _Ranges:
    yield index, 0, weight.size(0)


def _each_dim(tensor: Tensor, indices: Any, *_: Any) -> _Ranges:
    dim = 0
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is not None and not is_mask:
            yield index, -tensor.size(dim), tensor.size(dim)
        dim += index.dim() if is_mask else 1


def _flat(tensor: Tensor, index: Tensor, *_: Any) -> _Ranges:
    yield index, -tensor.numel(), tensor.numel()


def _classes(scores: Tensor, target: Tensor, *rest: Any) -> _Ranges:
    ignored = rest[2] if len(rest) > 2 else -100
    yield target[target != ignored], 0, scores.size(1 if scores.dim() > 1 else 0)


def _labels(log_probs: Tensor, targets: Tensor, *_: Any) -> _Ranges:
    yield targets, 0, log_probs.size(-1)


#: By name without the underscore of those that write.
_RANGES: dict[str, Callable[..., _Ranges]] = {
    **dict.fromkeys(("embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"), _rows),
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put"), _each_dim),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce", "index_select"), _along),
    **dict.fromkeys(("index_add", "index_copy", "index_fill", "index_reduce"), _along),
    **dict.fromkeys(("take", "put"), _flat),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _classes),
    **dict.fromkeys(("_ctc_loss", "_cudnn_ctc_loss"), _labels),
    "embedding_renorm": _renormed,
}
