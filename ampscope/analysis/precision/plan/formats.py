"""What casting tensors to a format would make of their values: read off histograms of exponents, tensor by tensor."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ampscope.analysis.numerics.arrays import FloatArray
from ampscope.analysis.numerics.exponents import Exponents
from ampscope.analysis.numerics.number_format import FORMATS, NumberFormat
from ampscope.trace.schema import BLOCK

#: The MX formats, by the format of their elements.
MX = {"mxfp8_e4m3": FORMATS["float8_e4m3fn"], "mxfp8_e5m2": FORMATS["float8_e5m2"]}
#: Formats in which each tensor has a scale of its own.
SCALED = ("float8_e4m3fn", "float8_e5m2")
#: The formats of a plan, in the order in which they are told.
NAMES = ("tf32", "bfloat16", "float16", *SCALED, *MX)


class Fate(NamedTuple):
    """Of each tensor, how many values, or how much of its mass, would be changed by more than rounding."""

    overflow: FloatArray
    lost: FloatArray  #: flushed to zero
    subnormal: FloatArray
    most_lost: FloatArray  #: where `lost` is an estimate, what it cannot exceed; else the same


def cast_fate(tensors: Exponents, into: NumberFormat, factors: FloatArray) -> tuple[Fate, Fate]:
    """What a cast makes of values and of mass.

    Args:
        tensors: The histograms.
        into: The format.
        factors: Of each tensor, what it is multiplied by before the cast.
    """
    fits = tensors.below(into.overflow / factors, inclusive=into.tie_fits)
    lost = tensors.below(into.flushed / factors, inclusive=True)
    below = tensors.below(into.subnormal / factors)
    whole = (tensors.values, tensors.mass)
    counts, masses = (
        Fate(np.maximum(all_ - fit, 0.0), gone, np.maximum(low - gone, 0.0), gone)
        for all_, fit, gone, low in zip(whole, fits, lost, below, strict=True)
    )
    return counts, masses


def block_fate(tensors: Exponents, into: NumberFormat, numel: FloatArray) -> tuple[Fate, Fate]:
    """The same for blocks that share a power of two as their scale, the one that takes the largest to the top.

    What lies in a block with what, no histogram of the whole tensor tells. Where the trace holds how far values lie
    below the largest of their block, that is counted. Elsewhere this is what is to be expected if values lie among each
    other in no order; where large ones lie together, less is lost, and `Fate.most_lost` is what no order exceeds.

    Args:
        tensors: The histograms.
        into: The format of the elements.
        numel: Of each tensor, how many elements it has, zeros among them.
    """
    bins = _Bins(tensors, numel)
    top = int(np.floor(np.log2(into.largest)))
    flushing, shrinking = top - into.lowest + 2, top - into.normal + 1
    lost = bins.beside(flushing)
    below = bins.beside(shrinking) - (bins.beside(shrinking) - bins.beside(shrinking + 1)) * 2.0**-into.mantissa_bits
    over = bins.above(into.overflow / 2.0**top) * bins.alone
    fates = (over, lost, np.maximum(below - lost, 0.0), bins.most_beside(flushing))
    expected, masses = Fate(*map(bins.sums, fates)), Fate(*(bins.sums(each * bins.mean) for each in fates))
    falls, leading = tensors.falls, bins.sums(bins.counts * bins.alone)
    gone = falls[:, flushing:].sum(1)
    low = falls[:, shrinking:].sum(1) - falls[:, shrinking] * 2.0**-into.mantissa_bits - gone
    past = falls[:, 0] * np.divide(expected.overflow, leading, where=leading > 0, out=np.zeros_like(leading))
    counted = (past, gone, np.maximum(low, 0.0), gone)
    known = ~np.isnan(falls[:, 0])
    return Fate(*(np.where(known, *each) for each in zip(counted, expected, strict=True))), masses


class _Bins:
    """The bins of all tensors as a table, a row a tensor and a column an exponent."""

    def __init__(self, tensors: Exponents, numel: FloatArray) -> None:
        self._tensors = tensors
        self._first = int(tensors.exponent.min()) if tensors.exponent.size else 0
        width = int(tensors.exponent.max()) - self._first + 1 if tensors.exponent.size else 0
        self._place = (tensors.row, tensors.exponent - self._first)
        self._shape = (tensors.rows, width)
        self.counts = self._table(tensors.count)
        self._numel = np.maximum(numel, self.counts.sum(1))
        self._zeros = self._numel - self.counts.sum(1)

    def _table(self, of_bins: FloatArray) -> FloatArray:
        table = np.zeros(self._shape)
        table[self._place] = of_bins
        return table

    def sums(self, table: FloatArray) -> FloatArray:
        """Of each tensor, over its bins."""
        found: FloatArray = table.sum(1)
        return found

    def _up_to(self, octaves: int) -> FloatArray:
        """Of each bin, the share of elements that lie less than so many octaves above it."""
        total = np.cumsum(self.counts, 1) + self._zeros[:, None]
        shifted = np.empty(self._shape)
        end = max(self._shape[1] - octaves + 1, 0)
        shifted[:, :end] = total[:, octaves - 1 :]
        shifted[:, end:] = self._numel[:, None]
        found: FloatArray = np.minimum(shifted / self._numel[:, None], 1.0)
        return found

    def beside(self, octaves: int) -> FloatArray:
        """Of each bin, the values to be expected in a block with one that lies so many octaves above or more."""
        found: FloatArray = self.counts * (1.0 - self._up_to(octaves) ** (BLOCK - 1))
        return found

    @property
    def alone(self) -> FloatArray:
        """Of each bin, the chance of a value to have none above its bin in its block."""
        found: FloatArray = self._up_to(1) ** (BLOCK - 1)
        return found

    def above(self, factor: float) -> FloatArray:
        """Of each bin, the values that are more than so many times its least magnitude."""
        return self._table(self._tensors.above_in_bins(factor))

    def most_beside(self, octaves: int) -> FloatArray:
        """As `beside`, whatever lies where: each of the largest leads a block, and the smallest fill these."""
        least = np.ceil(self._numel / BLOCK)[:, None]
        larger = np.cumsum(self.counts[:, ::-1], 1)[:, ::-1]  # of each bin, itself and all above
        blocks = np.zeros(self._shape)
        blocks[:, : max(self._shape[1] - octaves, 0)] = np.minimum(larger, least)[:, octaves:]
        found, taken = np.zeros(self._shape), np.zeros(self._shape[0])
        for column in range(self._shape[1] - 1, -1, -1):
            room = (BLOCK - 1) * blocks[:, column] - taken
            found[:, column] = np.clip(room, 0.0, self.counts[:, column])
            taken += found[:, column]
        return found

    @property
    def mean(self) -> FloatArray:
        """Of each bin, the mean magnitude; zero of an empty one."""
        filled = self.counts > 0
        found: FloatArray = np.divide(
            self._table(self._tensors.bin_mass), self.counts, where=filled, out=np.zeros(self._shape)
        )
        return found
