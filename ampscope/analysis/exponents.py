"""How many of a tensor's values lie below a magnitude, and how much of its mass, by the histogram of its exponents.

Within a bin, a factor of two wide, the values are taken to be spread as the bins beside it say: a monotone cubic
through the counts so far (Fritsch and Butland), between the smallest and the largest magnitude that were measured. They
lie on the grid of the dtype that they came in, which near its smallest numbers is coarse.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ampscope.analysis.arrays import BoolArray, FloatArray, IntArray

#: Parts of a bin by which its mass is added up.
_PARTS = 8


@dataclass(frozen=True)
class Exponents:
    """The histograms of many tensors: bins of all rows end to end, and what is known of each row.

    Args:
        row: Of each bin, the tensor it is of; ascending, and no tensor without a bin.
        exponent: Of each bin, the base-2 exponent of its least magnitude; ascending by one within a row.
        count: Of each bin, how many values it holds.
        low: Of each row, the smallest magnitude that is not zero.
        high: Of each row, the largest finite one.
        mantissa: Of each row, the mantissa bits of the dtype it came in.
        lowest: Of each row, the exponent of that dtype's smallest subnormal.
        top: Of each row, its largest magnitudes, descending; NaN where so many are not known.
        falls: Of each row, how many values lie how many powers of two below the largest of their block; NaN in a row
            where that is not known.
    """

    row: IntArray
    exponent: IntArray
    count: FloatArray
    low: FloatArray
    high: FloatArray
    mantissa: IntArray
    lowest: IntArray
    top: FloatArray
    falls: FloatArray

    @property
    def rows(self) -> int:
        """How many tensors there are."""
        return self.low.size

    @cached_property
    def values(self) -> FloatArray:
        """The number of values that are not zero, by row."""
        return self._by_row(self.count)

    @cached_property
    def mass(self) -> FloatArray:
        """The sum of the magnitudes, by row."""
        return np.where(self._is_whole, np.nansum(self.top, 1), self._by_row(self.bin_mass))

    @cached_property
    def _is_whole(self) -> BoolArray:
        """Whether a row's largest magnitudes are all that it has: then no histogram need say what they weigh."""
        found: BoolArray = (~np.isnan(self.top)).sum(1) >= self.values
        return found

    def below(self, limits: FloatArray, *, inclusive: bool = False) -> tuple[FloatArray, FloatArray]:
        """Returns how many values lie below a limit, and their mass, by row.

        Args:
            limits: One a row, above zero.
            inclusive: Whether the limit itself counts as below.
        """
        limit = np.log2(self._on_grid(limits, inclusive))[self.row]
        left, width = self._edges
        part = np.clip((limit - left) / width, 0.0, 1.0)
        counts = np.where(part == 1.0, self.count, self._so_far(part, slice(None)))
        masses = np.where(part == 1.0, self.bin_mass, 0.0)
        cut = np.flatnonzero((part > 0.0) & (part < 1.0))
        masses[cut] = self._mass_to(part[cut], cut)
        return self._beside_the_top(limits, self._by_row(counts), self._by_row(masses), inclusive=inclusive)

    def _beside_the_top(
        self, limits: FloatArray, counts: FloatArray, masses: FloatArray, *, inclusive: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Makes counts and masses below limits exact, where limits lie among the known largest magnitudes."""
        limit = limits[:, None]
        above = self.top > limit if inclusive else self.top >= limit
        known = ~np.isnan(self.top).all(1) & ~above[:, -1]
        over = np.where(above, self.top, 0.0).sum(1)
        under = np.where(above | np.isnan(self.top), 0.0, self.top).sum(1)
        return (
            np.where(known, self.values - above.sum(1), counts),
            np.where(known, np.where(self._is_whole, under, np.maximum(self.mass - over, 0.0)), masses),
        )

    def above_in_bins(self, factor: float) -> FloatArray:
        """Returns how many values of each bin are more than ``factor`` (between 1 and 2) times its least magnitude."""
        left, width = self._edges
        part = np.clip((self.exponent + np.log2(factor) - left) / width, 0.0, 1.0)
        return np.maximum(self.count - self._so_far(part, slice(None)), 0.0)

    def _by_row(self, of_bins: FloatArray) -> FloatArray:
        return np.bincount(self.row, of_bins, self.rows).astype(np.float64, copy=False)

    def _on_grid(self, limits: FloatArray, inclusive: bool) -> FloatArray:
        """Returns the start of the first cell that is not below a limit: a bin counts a value where its cell begins."""
        cell = self._cell(limits)
        steps = limits / cell
        found: FloatArray = cell * (np.floor(steps) + 1 if inclusive else np.maximum(np.ceil(steps), 1))
        return found

    def _cell(self, magnitudes: FloatArray) -> FloatArray:
        """The spacing of the rows' dtypes at these magnitudes."""
        power = np.floor(np.log2(magnitudes))
        cell: FloatArray = 2.0 ** np.maximum(power - self.mantissa, self.lowest)
        return cell

    @cached_property
    def _is_first(self) -> BoolArray:
        first: BoolArray = np.diff(self.row, prepend=-1) != 0
        return first

    @cached_property
    def _is_last(self) -> BoolArray:
        last: BoolArray = np.diff(self.row, append=self.rows) != 0
        return last

    @cached_property
    def _edges(self) -> tuple[FloatArray, FloatArray]:
        """The logarithm at which each bin begins, and its width."""
        left, right = self.exponent.astype(float), self.exponent + 1.0
        low, high = np.log2(self.low)[self.row], np.log2(self.high + self._cell(self.high))[self.row]
        left = np.where(self._is_first, np.clip(low, left, right), left)
        right = np.where(self._is_last, np.clip(high, left, right), right)
        return left, np.maximum(right - left, 1e-9)

    @cached_property
    def _slopes(self) -> tuple[FloatArray, FloatArray]:
        """The density of values where each bin begins and where it ends, per unit of the logarithm."""
        width = self._edges[1]
        own = self.count / width
        between = np.zeros(max(own.size - 1, 0))
        both = (own[:-1] > 0) & (own[1:] > 0) & ~self._is_last[:-1]
        before, after, low, high = width[:-1][both], width[1:][both], own[:-1][both], own[1:][both]
        between[both] = 3 * (before + after) / ((2 * after + before) / low + (after + 2 * before) / high)
        begins = np.where(self._is_first, own, np.concatenate(([0.0], between)))
        ends = np.where(self._is_last, own, np.concatenate((between, [0.0])))
        first, last = (
            np.flatnonzero(end & ~(self._is_first & self._is_last)) for end in (self._is_first, self._is_last)
        )
        begins[first] = _at_end(width[first], width[first + 1], own[first], own[first + 1])
        ends[last] = _at_end(width[last], width[last - 1], own[last], own[last - 1])
        return begins, ends

    def _so_far(self, part: FloatArray, bins: IntArray | slice) -> FloatArray:
        """Values of bins that lie in their lower ``part``."""
        width = self._edges[1][bins]
        begins, ends = (slopes[bins] for slopes in self._slopes)
        square, cube = part**2, part**3
        whole: FloatArray = self.count[bins] * (3 * square - 2 * cube)
        whole += width * (begins * (cube - 2 * square + part) + ends * (cube - square))
        return whole

    def _mass_to(self, part: FloatArray, bins: IntArray | slice) -> FloatArray:
        left, width = (edges[bins] for edges in self._edges)
        total, before = np.zeros_like(part), np.zeros_like(part)
        for number in range(_PARTS):
            counted = self._so_far(part * (number + 1) / _PARTS, bins)
            total += (counted - before) * 2.0 ** (left + width * part * (number + 0.5) / _PARTS)
            before = counted
        cells = self._cells[bins] / 2  # a value stands where its cell begins
        return np.maximum(total - before * cells, before * 2.0**left)

    @cached_property
    def _cells(self) -> FloatArray:
        cells: FloatArray = 2.0 ** np.maximum(self.exponent - self.mantissa[self.row], self.lowest[self.row])
        return cells

    @cached_property
    def bin_mass(self) -> FloatArray:
        """The sum of the magnitudes in each bin."""
        whole = self._mass_to(np.ones_like(self.count), slice(None))
        last = self._is_last & (self.count > 0)
        ends, high = self.count[last], self.high[self.row[last]]
        whole[last] = (whole[last] * np.maximum(ends - 1, 0.0) + high * np.minimum(ends, 1.0) * ends) / ends
        return whole


def _at_end(width: FloatArray, beside: FloatArray, own: FloatArray, other: FloatArray) -> FloatArray:
    """The density where a row of bins ends: that of a parabola through its last two, kept between none and thrice."""
    parabola = ((2 * width + beside) * own - width * other) / (width + beside)
    return np.clip(parabola, 0.0, 3 * own)
