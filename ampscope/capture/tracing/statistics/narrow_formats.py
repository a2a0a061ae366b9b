"""Measures for narrow formats what a histogram of exponents lacks: neighbours, and the largest elements one by one.

In an MX format 32 elements that lie beside each other share a scale, which goes by the largest of them: what becomes
of the others depends on how far below it they lie. And a format with one scale for a tensor loses what has outgrown the
largest of earlier steps: a few elements, which may have much of a gradient's mass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture.tracing.statistics.exponent_histogram import bins_of, magnitude_bits
from ampscope.trace.schema import BLOCK, BLOCK_FALLS, TOP_VALUES

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
