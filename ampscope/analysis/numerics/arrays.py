"""The numbers of a query as NumPy arrays, with what is not known told apart from what is not a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        """Where a column is not null."""
        return ~np.ma.getmaskarray(self.arrays[name])

    def bad(self, name: str) -> BoolArray:
        """Where a number is known and not finite."""
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
    return Columns({name: _joined(each) for name, each in arrays.items()})


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    if not any(isinstance(each, np.ma.MaskedArray) for each in arrays):
        return np.concatenate(arrays)
    masks = [np.ma.getmaskarray(each) for each in arrays]
    return np.ma.masked_array(np.concatenate([np.asarray(each) for each in arrays]), np.concatenate(masks))
