"""A few elements of what a call returned: enough to tell whether a replay of it gives the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.local_shards import has_arrived, local
from ampscope.capture.torch_support.torch_private import past_modes
from ampscope.capture.tracing.statistics.stats import can_be_bad


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
