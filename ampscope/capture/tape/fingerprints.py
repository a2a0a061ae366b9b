"""A few elements of what a call returned: enough to tell whether a replay of it gives the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.sharding import has_arrived, local
from ampscope.capture.torch_support.torch_private import past_modes
from ampscope.capture.tracing.light_statistics import can_be_bad

#: Of the greatest magnitude: what other orders of the same sums come to, in half precision and through several layers.
_ROUNDING = 0.01


def fingerprint(value: Any, leaves: int = 4) -> list[Tensor]:
    """A few elements of each of the first floating tensors in ``value``, spread over their extent; no sync.

    Of a tensor whose values another rank is still sending, none: it is not waited for.
    """
    taken = []
    for tensor in map(local, tensor_tree.tensors(value)):
        dense = tensor.layout is torch.strided and has_arrived(tensor)
        if dense and can_be_bad(tensor) and tensor.numel() and not tensor.is_nested:
            taken.append(_spread(tensor))
        if len(taken) == leaves:
            break
    return taken


def _spread(tensor: Tensor) -> Tensor:
    """Some four or more places along each dimension, as a copy: with one op for all the slices."""
    sizes, strides = [], []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        apart = max(1, size // 4)
        sizes.append((size + apart - 1) // apart)
        strides.append(stride * apart)
    past_dispatch, past_functions = past_modes([tensor])
    with past_dispatch, past_functions:
        return tensor.detach().as_strided(sizes, strides, tensor.storage_offset()).clone()


def alike(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether two lists of tensors hold the same values, NaN equal to NaN."""
    if len(ours) != len(theirs):
        return False
    return all(
        a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())
        for a, b in zip(ours, theirs, strict=True)
    )


@dataclass(slots=True)
class Differences:
    """The differences of a replay, in words; the real step is known by a few elements of what its calls returned."""

    found: list[str] = field(default_factory=list)
    held_otherwise: bool = False  #: what the tape holds is known to have been changed since the real step
    input_changed: bool = False  #: an input is, which may be quite another one now
    came_of_change: bool = False  #: it was, and the calls return something else
    are_rounding: bool = True  #: what was returned differs by no more

    def note(self, text: str) -> None:
        """Notes that something which the calls were given, or left, is known to be another."""
        self.found.append(text)
        self.are_rounding = False

    def compare(self, text: str, ours: list[Tensor], theirs: list[Tensor]) -> None:
        """Notes ``text`` where the replay's values are not, to the bit, those of the real step."""
        if not alike(ours, theirs):
            self.found.append(text)
            self.came_of_change |= self.input_changed
            self.are_rounding = self.are_rounding and _close(ours, theirs)


def _close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether values of the same shapes differ by rounding, and none of them is infinite or NaN on one side only."""
    pairs = list(zip(ours, theirs, strict=False))
    if len(ours) != len(theirs) or any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return False
    return all(_differ_little(a, b) for a, b in pairs)


def _differ_little(one: Tensor, other: Tensor) -> bool:
    finite = other.isfinite()
    if not torch.equal(finite, one.isfinite()) or not torch.equal(one[~finite].isnan(), other[~finite].isnan()):
        return False
    wide = torch.complex128 if other.is_complex() else torch.float64
    apart, size = (each[finite].detach().to(wide).abs() for each in (one - other, other))
    return not apart.numel() or bool(apart.max() <= _ROUNDING * size.max())


def tensors_given(result: Any) -> int:
    """How many tensors a call returned, one or a tuple of them; 0 for anything else."""
    if isinstance(result, Tensor):
        return 1
    parts = result if type(result) in (tuple, list) else (result,)
    return len(parts) if all(isinstance(each, Tensor) for each in parts) else 0
