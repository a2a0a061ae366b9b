"""Samples of many tensors, end to end on their device, until the histograms of their exponents are made."""

from __future__ import annotations

import torch
from torch import Tensor

from ampscope.capture.torch_support.dtypes import torch_dtype
from ampscope.capture.tracing.statistics.exponent_histogram import Histogram, histograms
from ampscope.trace.dtypes import FINFO

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
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, tensors: int) -> None:
        self._tensors = tensors
        with torch.inference_mode(mode=False):  # else nothing could be written outside of that mode later
            self._values = torch.empty(tensors * SAMPLE, device=device, dtype=dtype)
        self._used = 0
        self._numbers: list[int] = []
        self._lengths: list[int] = []
        self._weights: list[float] = []
        self._smallest: list[int] = []

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

    def empty(self) -> dict[int, Histogram]:
        """The histograms of all there is, by number; waits for the device."""
        if not self._numbers:
            return {}
        values = self._values[: self._used].cpu().numpy()
        made = histograms(values, self._lengths, smallest=self._smallest, weights=self._weights)
        found = dict(zip(self._numbers, made, strict=True))
        self._used = 0
        self._numbers, self._lengths, self._weights, self._smallest = [], [], [], []
        return found


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
