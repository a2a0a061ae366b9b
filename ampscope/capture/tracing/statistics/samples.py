"""Samples of many tensors, end to end on their device, until the histograms of their exponents are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture.torch_support.dtypes import torch_dtype
from ampscope.capture.tracing.statistics import narrow_formats
from ampscope.capture.tracing.statistics.exponent_histogram import Histogram, histograms
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import BLOCK

#: Elements looked at for zeros, subnormals and the exponent histogram; larger tensors are strided down to this.
SAMPLE = 1 << 12
#: Base-2 exponent of the smallest normal number of each dtype that has any.
_NORMAL = {torch_dtype(name): info.normal for name, info in FINFO.items()}


class Samples:
    """Samples of tensors of one device.

    Args:
        device: Where they lie.
        dtype: In which they are kept: float32, or float64.
        tensors: For how many tensors there is room.
        for_formats: Also what tells how they would fit narrower formats.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, tensors: int, *, for_formats: bool = False) -> None:
        self._tensors = tensors
        with torch.inference_mode(mode=False):  # else nothing could be written outside of that mode later
            self._values = torch.empty(tensors * SAMPLE, device=device, dtype=dtype)
            self._blocks = torch.empty_like(self._values) if for_formats else None
        self._used = self._in_blocks = 0
        self._numbers: list[int] = []
        self._lengths: list[int] = []
        self._weights: list[float] = []
        self._smallest: list[int] = []
        self._block_lengths: list[int] = []
        self._block_weights: list[float] = []

    @property
    def full(self) -> bool:
        """Whether there is room for no other."""
        return len(self._numbers) == self._tensors

    def add(self, number: int, values: Tensor, of: Tensor) -> None:
        """Takes a sample; no wait.

        Args:
            number: The tensor's.
            values: Its numbers.
            of: The tensor itself.
        """
        taken = sample(values)
        length = taken.numel()
        self._values[self._used : self._used + length].copy_(taken)
        self._used += length
        self._numbers.append(number)
        self._lengths.append(length)
        self._weights.append(of.numel() / length)
        self._smallest.append(_NORMAL.get(of.dtype, _NORMAL.get(values.dtype, _NORMAL[self._values.dtype])))
        if self._blocks is not None:
            self._add_blocks(self._blocks, values, of)

    def _add_blocks(self, room: Tensor, values: Tensor, of: Tensor) -> None:
        taken = narrow_formats.blocks_of(values, SAMPLE)
        length = taken.numel()
        begin, self._in_blocks = self._in_blocks, self._in_blocks + -(-length // BLOCK) * BLOCK
        room[begin : begin + length].copy_(taken)
        room[begin + length : self._in_blocks].zero_()
        self._block_lengths.append(self._in_blocks - begin)
        self._block_weights.append(of.numel() / length)

    def empty(self) -> dict[int, Histogram]:
        """The histograms of all there is, by number; waits for the device."""
        if not self._numbers:
            return {}
        values = self._values[: self._used].cpu().numpy()
        made = histograms(values, self._lengths, smallest=self._smallest, weights=self._weights)
        if self._blocks is not None:
            made = self._for_formats(self._blocks[: self._in_blocks].cpu().numpy(), values, made)
        found = dict(zip(self._numbers, made, strict=True))
        self._used = self._in_blocks = 0
        self._numbers, self._lengths, self._weights, self._smallest = [], [], [], []
        self._block_lengths, self._block_weights = [], []
        return found

    def _for_formats(self, blocks: NDArray[Any], values: NDArray[Any], made: list[Histogram]) -> list[Histogram]:
        falls = narrow_formats.block_falls(blocks, self._block_lengths, self._block_weights)
        parts = np.split(values, np.cumsum(self._lengths)[:-1])
        tops = [
            narrow_formats.top_values(part) if weight == 1.0 else None
            for part, weight in zip(parts, self._weights, strict=True)
        ]
        return [
            one if one.exp_counts is None else one._replace(top_values=top, block_falls=fall)
            for one, top, fall in zip(made, tops, falls, strict=True)
        ]


def width(values: Tensor) -> torch.dtype:
    """The dtype in which a sample of a tensor's numbers is kept."""
    return torch.float64 if values.dtype is torch.float64 else torch.float32


def sample(tensor: Tensor, most: int = SAMPLE) -> Tensor:
    """At most ``most`` elements, evenly spaced; an odd step, so that rows of even length are not read in one column."""
    size = tensor.numel()
    step = -(-size // most) | 1
    if tensor.is_contiguous():
        return tensor.view(-1)[::step]
    return tensor.take(torch.arange(0, size, step, device=tensor.device))
