"""How large values got at each place in each stretch of sampled steps: what a heat map is drawn of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ampscope.analysis.numerics.arrays import FloatArray, IntArray
from ampscope.analysis.precision.ranges.sampled_steps import Stretch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """A row for each place, by its number, and a column for each stretch."""

    stretches: tuple[Stretch, ...] = ()
    #: Logarithm of the largest finite magnitude; NaN where none was measured, or all was zero.
    heights: FloatArray = field(default_factory=lambda: np.empty((0, 0)))
    #: Subnormal ones among the elements that are not zero; NaN where that was not measured.
    subnormal: FloatArray = field(default_factory=lambda: np.empty((0, 0)))

    def largest_in(self, number: int) -> Stretch | None:
        """The stretch in which a place's values were largest; None where nothing is known."""
        own = self.heights[number] if number < len(self.heights) else np.empty(0)
        return self.stretches[int(np.nanargmax(own))] if np.isfinite(own).any() else None


def make_cells(
    numbers: IntArray,
    steps: IntArray,
    sizes: FloatArray,
    lost: tuple[FloatArray, FloatArray],
    *,
    places: int,
    stretches: Sequence[Stretch],
) -> Cells:
    """The cells of sums by place and stretch.

    Args:
        numbers: Of each sum the number of its place; negative ones are left out.
        steps: A step of its stretch, or one after it and before the next.
        sizes: The largest magnitude.
        lost: How many elements are subnormal, and how many are not zero, where that was measured.
        places: How many there are.
        stretches: All of them.
    """
    kept = numbers >= 0
    begins = np.array([each.first for each in stretches], np.int64)
    cell = numbers[kept], np.maximum(np.searchsorted(begins, steps[kept], side="right") - 1, 0)
    shape = places, len(begins)
    largest = np.full(shape, np.nan)
    np.fmax.at(largest, cell, sizes[kept])
    subnormal, nonzero = (_added(shape, cell, values[kept]) for values in lost)
    with np.errstate(divide="ignore", invalid="ignore"):
        return Cells(
            stretches=tuple(stretches),
            heights=np.where(largest > 0, np.log2(largest), np.nan),
            subnormal=np.where(nonzero > 0, subnormal / nonzero, np.nan),
        )


def _added(shape: tuple[int, int], cell: tuple[IntArray, IntArray], values: FloatArray) -> FloatArray:
    found = np.zeros(shape)
    np.add.at(found, cell, np.nan_to_num(values))
    return found
