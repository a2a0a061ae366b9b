"""Histograms of exponents of many samples at once, read off the bits of the numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ampscope.trace.dtypes import FINFO


class Histogram(NamedTuple):
    """The finite elements of one sample, by magnitude."""

    zeros: int
    subnormals: int  #: non-zero and below the smallest normal of the dtype they came from
    min_positive: float | None
    exp_low: int | None  #: base-2 exponent of the first bin of ``exp_counts``
    exp_counts: tuple[int, ...] | None
    top_values: tuple[float, ...] | None = None
    block_falls: tuple[int, ...] | None = None
    flushed: int | None = None


class Layout(NamedTuple):
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


SINGLE = Layout(np.float32, np.int32, FINFO["float32"].mantissa_bits, 1 - FINFO["float32"].normal)
DOUBLE = Layout(np.float64, np.int64, FINFO["float64"].mantissa_bits, 1 - FINFO["float64"].normal)


def histograms(
    values: NDArray[Any], lengths: list[int], *, smallest: list[int], weights: list[float]
) -> list[Histogram]:
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
    bare = [Histogram(*row, exp_low=None, exp_counts=None) for row in rows]
    return [
        one
        if one.min_positive is None
        else one._replace(exp_low=int(low) - layout.bin_of(0), exp_counts=tuple(row[low:high].tolist()))
        for one, row, low, high in zip(bare, scaled, lowest, beyond, strict=True)
    ]


def magnitude_bits(values: NDArray[Any]) -> tuple[Layout, NDArray[Any]]:
    """The bits of numbers without their signs, and how they are laid out."""
    layout = SINGLE if values.dtype == np.float32 else DOUBLE
    return layout, values.view(layout.integer) & np.iinfo(layout.integer).max


def bins_of(bits: NDArray[Any], layout: Layout) -> NDArray[Any]:
    """The bin of each number, of a one-dimensional array; see `Layout`."""
    bins: NDArray[Any] = bits >> layout.mantissa
    bins += layout.mantissa
    low = np.flatnonzero(bits < 1 << layout.mantissa)  # zeros and subnormals of this layout
    bins[low] = np.frexp(bits[low].astype(np.float64))[1]
    return bins


def _count(bits: NDArray[Any], lengths: list[int], layout: Layout) -> NDArray[np.int64]:
    """Elements in each bin, a row for each sample."""
    bins = bins_of(bits, layout)
    bins += np.repeat(np.arange(len(lengths), dtype=layout.integer) * layout.integer(layout.bins), lengths)
    return np.bincount(bins, minlength=len(lengths) * layout.bins).reshape(len(lengths), layout.bins)


def _smallest(bits: NDArray[Any], lengths: list[int], layout: Layout) -> list[float | None]:
    """The smallest non-zero finite magnitude of each sample."""
    starts = np.cumsum([0, *lengths[:-1]])
    least = np.minimum.reduceat(np.where(bits == 0, layout.infinity, bits).astype(layout.integer), starts)
    values = least.view(layout.floating).tolist()
    return [value if bit < layout.infinity else None for value, bit in zip(values, least.tolist(), strict=True)]
