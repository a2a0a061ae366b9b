"""A value over steps, thinned to what a screen can show without losing a spike."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ampscope.analysis.numerics.arrays import FloatArray, IntArray

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
