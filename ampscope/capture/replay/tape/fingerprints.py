"""A few elements of what a call returned: enough to tell whether a replay of it gives the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.local_shards import has_arrived, local
from ampscope.capture.torch_support.torch_private import past_modes
from ampscope.capture.tracing.statistics.stats import can_be_bad

#: Numbers differ by more than rounding beyond this share of the largest. Source: judgement; bfloat16 rounds to 1/256.
_FAR = 1 / 16
#: Share of the numbers that are most of them.
_MOST = 0.75


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
    apart = [max(1, size // 4) for size in tensor.shape]
    sizes = [(size + each - 1) // each for size, each in zip(tensor.shape, apart, strict=True)]
    strides = [stride * each for stride, each in zip(tensor.stride(), apart, strict=True)]
    past_dispatch, past_functions = past_modes([tensor])
    with torch.no_grad(), past_dispatch, past_functions:
        return tensor.as_strided(sizes, strides, tensor.storage_offset()).clone()


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
    """How a replay differs from the real step."""

    words: list[str] = field(default_factory=list)
    held_otherwise: bool = False  #: what the tape holds is known to have been changed since the real step
    contradicted: bool = False  #: a call gave other numbers, of a size that only other values explain
    _failed: bool = False

    def of_output(self, name: str, ours: list[Tensor], theirs: list[Tensor], *, computed_alike: bool) -> None:
        """Notes what a call returned.

        After an output that was not finite in the real step, finite ones may have come of it, and contradict nothing.

        Args:
            name: Of what was called.
            ours: Fingerprint of what it returned now.
            theirs: That of the real step.
            computed_alike: The real step ran the same code; a compiled one may round otherwise.
        """
        if alike(ours, theirs):
            return
        self.words.append(f"the output of {name} differs")
        self._failed |= not all(bool(each.isfinite().all()) for each in theirs)
        self.contradicted |= computed_alike and not self._failed and contradict(ours, theirs)


def contradict(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether most of a tensor's numbers differ by more than rounding and the order of sums explain.

    One value that a fault changed reaches some of a batch; a call on other values gives other numbers all over.
    """
    if [(a.shape, a.dtype) for a in ours] != [(b.shape, b.dtype) for b in theirs]:
        return True
    return any(_far(a, b).float().mean().item() > _MOST for a, b in zip(ours, theirs, strict=True))


def _far(ours: Tensor, theirs: Tensor) -> Tensor:
    largest = max(extreme.abs() for each in (ours, theirs) for extreme in each.aminmax())
    return (ours.double() - theirs.double()).abs() > _FAR * largest.double()
