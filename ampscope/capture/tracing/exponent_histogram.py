"""Samples of many tensors lie end to end on their device until the histograms of their exponents are made.

A histogram of exponents does not tell all of narrower formats. In an MX format 32 elements that lie beside each other
share a scale, which goes by the largest of them: what becomes of the others depends on how far below it they lie. And a
format with one scale for a tensor loses what has outgrown the largest of earlier steps: a few elements, which may have
much of a gradient's mass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture.torch_support.tensor_tree import torch_dtype
from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import BLOCK, BLOCK_FALLS, TOP_VALUES


class ExponentHistogram(NamedTuple):
    """The finite elements of one sample, by magnitude."""

    zeros: int
    subnormals: int  #: non-zero and below the smallest normal of the dtype they came from
    min_positive: float | None
    exp_low: int | None  #: base-2 exponent of the first bin of ``exp_counts``
    exp_counts: tuple[int, ...] | None
    top_values: tuple[float, ...] | None = None
    block_falls: tuple[int, ...] | None = None
    flushed: int | None = None


class FloatLayout(NamedTuple):
    """How a floating dtype keeps its numbers.

    A number's bin is 0 for a zero, then one for each base-2 exponent from the smallest subnormal's on; all that is not
    finite is in the last one.
    """

    floating: type[np.floating[Any]]
    integer: type[np.signedinteger[Any]]  #: of the same width
    mantissa: int  #: bits
    bias: int

    @property
    def infinity(self) -> int:
        """The bits of infinity."""
        return (2 * self.bias + 1) << self.mantissa

    @property
    def bins(self) -> int:
        """How many bins there are."""
        return self.bin_of(self.bias + 1) + 1

    def bin_of(self, exponent: int) -> int:
        """The bin of numbers from ``2**exponent`` to below twice that."""
        return exponent + self.bias + self.mantissa


SINGLE = FloatLayout(np.float32, np.int32, FINFO["float32"].mantissa_bits, 1 - FINFO["float32"].normal)
DOUBLE = FloatLayout(np.float64, np.int64, FINFO["float64"].mantissa_bits, 1 - FINFO["float64"].normal)


def histograms(
    values: NDArray[Any], lengths: list[int], *, smallest: list[int], weights: list[float]
) -> list[ExponentHistogram]:
    """A histogram of each of the samples that lie end to end in ``values``.

    Args:
        values: float32 or float64, one-dimensional; not empty.
        lengths: Elements of each sample, at least one; they add up to the size of ``values``.
        smallest: For each sample, the base-2 exponent of its dtype's smallest normal number.
        weights: For each sample, how many elements one of them stands for.
    """
    layout, bits = magnitude_bits(values)
    counts = _count(bits, lengths, layout)
    finite = counts[:, 1:-1]
    scaled = np.rint(counts * np.asarray(weights)[:, None]).astype(np.int64)
    lowest = (finite > 0).argmax(1) + 1
    beyond = finite.shape[1] + 1 - (finite[:, ::-1] > 0).argmax(1)
    below = np.arange(1, layout.bins - 1) < layout.bin_of(0) + np.asarray(smallest)[:, None]
    subnormals = np.rint((finite * below).sum(1) * weights).astype(np.int64).tolist()
    rows = zip(scaled[:, 0].tolist(), subnormals, _smallest(bits, lengths, layout), strict=True)
    bare = [ExponentHistogram(*row, exp_low=None, exp_counts=None) for row in rows]
    return [
        one
        if one.min_positive is None
        else one._replace(exp_low=int(low) - layout.bin_of(0), exp_counts=tuple(row[low:high].tolist()))
        for one, row, low, high in zip(bare, scaled, lowest, beyond, strict=True)
    ]


def magnitude_bits(values: NDArray[Any]) -> tuple[FloatLayout, NDArray[Any]]:
    """The bits of numbers without their signs, and how they are laid out."""
    layout = SINGLE if values.dtype == np.float32 else DOUBLE
    return layout, values.view(layout.integer) & np.iinfo(layout.integer).max


def bins_of(bits: NDArray[Any], layout: FloatLayout) -> NDArray[Any]:
    """The bin of each number, of a one-dimensional array; see `FloatLayout`."""
    bins: NDArray[Any] = bits >> layout.mantissa
    bins += layout.mantissa
    low = np.flatnonzero(bits < 1 << layout.mantissa)  # zeros and subnormals of this layout
    bins[low] = np.frexp(bits[low].astype(np.float64))[1]
    return bins


def _count(bits: NDArray[Any], lengths: list[int], layout: FloatLayout) -> NDArray[np.int64]:
    """Elements in each bin, a row for each sample."""
    bins = bins_of(bits, layout)
    bins += np.repeat(np.arange(len(lengths), dtype=layout.integer) * layout.integer(layout.bins), lengths)
    return np.bincount(bins, minlength=len(lengths) * layout.bins).reshape(len(lengths), layout.bins)


def _smallest(bits: NDArray[Any], lengths: list[int], layout: FloatLayout) -> list[float | None]:
    """The smallest non-zero finite magnitude of each sample."""
    starts = np.cumsum([0, *lengths[:-1]])
    least = np.minimum.reduceat(np.where(bits == 0, layout.infinity, bits).astype(layout.integer), starts)
    values = least.view(layout.floating).tolist()
    return [value if bit < layout.infinity else None for value, bit in zip(values, least.tolist(), strict=True)]


#: Stands for the bin of what counts as no element: a zero, and what is not finite.
_LEFT_OUT = -(1 << 20)


def blocks_of(tensor: Tensor, most: int) -> Tensor:
    """Whole blocks of ``tensor`` in the order of its elements, evenly spaced; of a small one all elements.

    Args:
        tensor: Of real numbers.
        most: How many elements to take at most; a multiple of `BLOCK`.
    """
    size = tensor.numel()
    if size <= most:
        return tensor.reshape(-1)
    count = size // BLOCK
    step = -(-count // (most // BLOCK)) | 1
    if tensor.is_contiguous():
        return tensor.view(-1)[: count * BLOCK].view(count, BLOCK)[::step].reshape(-1)
    starts = torch.arange(0, count, step, device=tensor.device)[:, None] * BLOCK
    return tensor.take(starts + torch.arange(BLOCK, device=tensor.device)).reshape(-1)


def block_falls(values: NDArray[Any], lengths: list[int], weights: list[float]) -> list[tuple[int, ...]]:
    """How many elements lie how many powers of two below the largest of their block, for each of several samples.

    Args:
        values: float32 or float64, one-dimensional: samples end to end, each of whole blocks, filled up with zeros.
        lengths: Elements of each sample, multiples of `BLOCK`; they add up to the size of ``values``.
        weights: For each sample, how many elements one of them stands for.
    """
    layout, bits = magnitude_bits(values)
    bins = bins_of(bits, layout).astype(np.int32, copy=False)
    np.copyto(bins, _LEFT_OUT, where=(bins == 0) | (bits >= layout.infinity))
    bins = bins.reshape(-1, BLOCK)
    np.subtract(np.maximum(bins.max(1, keepdims=True), 0), bins, out=bins)
    left_out = bins >= -_LEFT_OUT
    np.minimum(bins, BLOCK_FALLS - 1, out=bins)
    bins[left_out] = BLOCK_FALLS
    owner = np.repeat(np.arange(len(lengths), dtype=np.int32), np.asarray(lengths) // BLOCK)
    bins += owner[:, None] * (BLOCK_FALLS + 1)
    counts = np.bincount(bins.reshape(-1), minlength=len(lengths) * (BLOCK_FALLS + 1)).reshape(-1, BLOCK_FALLS + 1)
    scaled = np.rint(counts[:, :-1] * np.asarray(weights)[:, None]).astype(np.int64)
    beyond = BLOCK_FALLS - (scaled[:, ::-1] > 0).argmax(1)
    return [tuple(row[:end]) for row, end in zip(scaled.tolist(), beyond.tolist(), strict=True)]


def top_values(values: NDArray[Any]) -> tuple[float, ...]:
    """The largest finite magnitudes among the elements of a tensor, descending."""
    sizes = np.abs(values)
    sizes = sizes[np.isfinite(sizes)]
    if sizes.size > TOP_VALUES:
        sizes = np.partition(sizes, -TOP_VALUES)[-TOP_VALUES:]
    return tuple(np.sort(sizes)[::-1].tolist())


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
        taken = blocks_of(values, SAMPLE)
        length = taken.numel()
        begin, self._in_blocks = self._in_blocks, self._in_blocks + -(-length // BLOCK) * BLOCK
        room[begin : begin + length].copy_(taken)
        room[begin + length : self._in_blocks].zero_()
        self._block_lengths.append(self._in_blocks - begin)
        self._block_weights.append(of.numel() / length)

    def empty(self) -> dict[int, ExponentHistogram]:
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

    def _for_formats(
        self, blocks: NDArray[Any], values: NDArray[Any], made: list[ExponentHistogram]
    ) -> list[ExponentHistogram]:
        falls = block_falls(blocks, self._block_lengths, self._block_weights)
        parts = np.split(values, np.cumsum(self._lengths)[:-1])
        tops = [top_values(part) if weight == 1.0 else None for part, weight in zip(parts, self._weights, strict=True)]
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
