"""A run's columns as arrays, and curves of them thinned to what a figure can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """The rows of a query as NumPy arrays, one a column, masked where null.

    Straight from the query engine: on the way through Arrow, a first array of numbers would load pandas wherever that
    is installed, a third of a second before anything can be shown.
    """

    arrays: Mapping[str, npt.NDArray[Any]]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def ints(self, name: str) -> IntArray:
        """A column of whole numbers that is never null."""
        return self.arrays[name].astype(np.int64, copy=False)

    def flags(self, name: str) -> BoolArray:
        """A column of truth values that is never null."""
        return self.arrays[name].astype(np.bool_, copy=False)

    def floats(self, name: str) -> FloatArray:
        """A column of numbers, NaN for null."""
        values: FloatArray = np.ma.filled(self.arrays[name].astype(np.float64, copy=False), np.nan)
        return values

    def known(self, name: str) -> BoolArray:
        """Returns a mask of the rows in which a column is not null."""
        return ~np.ma.getmaskarray(self.arrays[name])

    def bad(self, name: str) -> BoolArray:
        """Returns a mask of the rows in which a number is known and not finite."""
        wrong: BoolArray = self.known(name) & ~np.isfinite(self.floats(name))
        return wrong

    def where(self, kept: BoolArray | IntArray) -> Columns:
        """The rows for which ``kept`` is true, or those with these numbers."""
        return Columns({name: values[kept] for name, values in self.arrays.items()})

    def row(self, number: int) -> dict[str, Any]:
        """One row as Python values, None for null."""
        return {name: values[number : number + 1].tolist()[0] for name, values in self.arrays.items()}


def joined(pieces: Sequence[Columns]) -> Columns:
    """The rows of all pieces, which have the same columns, one after the other."""
    arrays = {name: [piece.arrays[name] for piece in pieces] for name in pieces[0].arrays}
    return Columns({name: joined_arrays(each) for name, each in arrays.items()})


def joined_arrays(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The elements of all arrays, masked where any is; of none an empty array."""
    if not arrays:
        return np.empty(0)
    if not any(isinstance(each, np.ma.MaskedArray) for each in arrays):
        return np.concatenate(arrays)
    masks = [np.ma.getmaskarray(each) for each in arrays]
    return np.ma.masked_array(np.concatenate([np.asarray(each) for each in arrays]), np.concatenate(masks))


#: Points kept of a curve: two per pixel of a wide figure. Shorter curves are kept whole.
MAX_POINTS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Finite values by step, and the steps at which the value was NaN or infinite."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    nonfinite: tuple[int, ...] = ()  #: thinned like `steps`; `nonfinite_count` is the true number
    nonfinite_count: int = 0
    thinned: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured."""
        return not self.steps and not self.nonfinite


def make_curve(steps: IntArray, values: FloatArray, *, points: int = MAX_POINTS) -> Curve:
    """The curve of ``values`` (float64, one per step, ascending steps), at most about ``points`` long."""
    finite = np.isfinite(values)
    good_steps, good, bad = steps[finite], values[finite], steps[~finite]
    keep = envelope(good, points)
    return Curve(
        steps=tuple(good_steps[keep].tolist()),
        values=tuple(good[keep].tolist()),
        nonfinite=thin_marks(bad, points // 2),
        nonfinite_count=len(bad),
        thinned=len(keep) < len(good),
    )


def thinner(curve: Curve, points: int) -> Curve:
    """The curve at most about ``points`` long."""
    steps, values = np.array(curve.steps, np.int64), np.array(curve.values, np.float64)
    keep = envelope(values, points)
    return replace(
        curve,
        steps=tuple(steps[keep].tolist()),
        values=tuple(values[keep].tolist()),
        nonfinite=thin_marks(np.array(curve.nonfinite, np.int64), points // 2),
        thinned=curve.thinned or len(keep) < len(values),
    )


def envelope(values: FloatArray, points: int) -> IntArray:
    """Indices that keep the first, the last and each pixel's smallest and largest of ``values``."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    width = -(-2 * count // points)
    rows = -(-count // width)
    index = np.minimum(np.arange(rows * width), count - 1).reshape(rows, width)
    pixels = values[index]
    each = np.arange(rows)
    picked = (index[each, pixels.argmin(axis=1)], index[each, pixels.argmax(axis=1)])
    return np.unique(np.concatenate([[0], *picked, [count - 1]]))


def thin_marks(steps: IntArray, marks: int = MAX_POINTS // 2) -> tuple[int, ...]:
    """At most about ``marks`` of the given steps: the first of each pixel."""
    if len(steps) <= marks:
        return tuple(steps.tolist())
    extent = int(steps.max()) - int(steps.min()) + 1
    pixel = (steps - steps.min()) * marks // extent
    return tuple(steps[np.unique(pixel, return_index=True)[1]].tolist())
