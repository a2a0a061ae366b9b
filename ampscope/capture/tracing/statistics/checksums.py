"""Checksums of tensors: whether two executions of a step were given the same, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampscope.capture.tracing.statistics import stats
from ampscope.capture.tracing.statistics.tensor_values import stored

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Elements up to which a tensor whose memory has gaps is copied for its sum.
_SMALL = 1 << 20
_WORD = 8


def checksum(tensor: Tensor) -> Tensor | None:
    """The sum of a tensor's bits, taken as integers, modulo ``2**64``; no wait.

    Two tensors of one shape and layout that differ in one element differ in it; the same elements in another order do
    not. Memory is read in words of 8 bytes, ten times faster than the least and greatest element are found.

    Args:
        tensor: Of any shape and dtype.

    Returns:
        A scalar (int64) on the tensor's device; None where there are no values to look at, or none without a copy of
        many.
    """
    tensor = stored(tensor.detach())
    if _is_in_words(tensor):
        return tensor.view(-1).view(torch.int64).sum()  # the stride of a dimension of one may be anything
    if not stats.measurable(tensor):
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    dense = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if not dense and tensor.numel() > _SMALL:
        return None
    flat = tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.contiguous().view(-1)
    in_word = _WORD // flat.element_size()
    if not flat.storage_offset() % in_word and not flat.numel() % in_word:
        return flat.view(torch.int64).sum(dtype=torch.int64)
    head = min(-flat.storage_offset() % in_word, flat.numel())
    tail = flat.numel() - (flat.numel() - head) % in_word
    narrow = _INTEGERS[flat.element_size()]
    parts = [(flat[:head], narrow), (flat[head:tail], torch.int64), (flat[tail:], narrow)]
    sums = [part.view(dtype).sum(dtype=torch.int64) for part, dtype in parts if part.numel()]
    return sum(sums[1:], start=sums[0])


def _is_in_words(tensor: Tensor) -> bool:
    """Whether a tensor with values can be read as it is, in words; most can."""
    return (
        tensor.__class__ is Tensor
        and stats.measurable(tensor)
        and tensor.is_contiguous()
        and tensor.dim() > 0
        and not tensor.is_complex()
        and not tensor.is_neg()
        and not tensor.shape[-1] * tensor.element_size() % _WORD
        and not tensor.storage_offset() * tensor.element_size() % _WORD
    )


def read(sums: Sequence[Tensor | None]) -> list[int | None]:
    """The numbers of checksums; waits for the devices."""
    found: list[int | None] = [None] * len(sums)
    for device in {each.device for each in sums if each is not None}:
        here = [(number, each) for number, each in enumerate(sums) if each is not None and each.device == device]
        values = torch.stack([each for _, each in here]).tolist()
        for (number, _), value in zip(here, values, strict=True):
            found[number] = value
    return found
