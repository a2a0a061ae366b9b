"""Recognises numbers that a loop computed in Python, clip factors above all: no tensor shows where they come from."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any, TypeGuard

from torch import Tensor

#: Thresholds remembered within a run.
_MOST = 4096
#: How far a threshold may be off that is told from a norm in float32 and a factor with an eps in it.
_OFF = 2e-6
#: Micro-batches by which a loop may divide together with the scale.
_MOST_PARTS = 4096
_ROUNDING = 1e-6
_LARGEST_INT = 1 << 62


class ClipFactors:
    """Factors that, times a norm read in the same step, give the same round number again: its threshold."""

    def __init__(self) -> None:
        self._first_met: dict[float, tuple[float, int]] = {}  # threshold -> factor and step with which that was
        self._latest = self._largest = self._sum = self._squares = 0.0

    def number_read(self, number: float) -> None:
        """The loop took a number out of what it had computed from scaled gradients."""
        if math.isfinite(number) and number > 0:
            self._latest, self._largest = number, max(number, self._largest)
            self._sum += number
            self._squares += number * number

    def forget_reads(self) -> None:
        """A step is over."""
        self._latest = self._largest = self._sum = self._squares = 0.0

    def inconsistent_since(self, name: str, factor: object, scales: Iterable[float], step: int) -> int | None:
        """Judges a number by which the loop multiplies (or divides) scaled gradients.

        Args:
            name: ``mul``, ``div`` or their in-place operators.
            factor: The number; anything else is no clip factor.
            scales: Scales that the loop has asked for: a threshold that is round only in their unit is right.
            step: The present step.

        Returns:
            The first step of the two at which it met the same threshold with different factors; None otherwise.
        """
        if not self._sum or not isinstance(factor, (int, float)) or factor in (0, 1) or not math.isfinite(factor):
            return None
        times = 1.0 / factor if "div" in name else float(factor)
        found = None
        for norm in self._norms():
            threshold = _rounded(times * norm)
            if threshold is None or any(_rounded(times * norm / scale) is not None for scale in scales):
                continue
            first, since = self._first_met.setdefault(threshold, (times, step))
            if abs(first - times) > _OFF * abs(times):
                found = since
        if len(self._first_met) > _MOST:
            self._first_met.clear()
        return found

    def _norms(self) -> set[float]:
        """Returns the numbers that may be a loop's norm: latest, largest, their sum, the root of the sum of squares."""
        return {self._latest, self._largest, self._sum, math.sqrt(self._sum), math.sqrt(self._squares)}


def _rounded(number: float) -> float | None:
    """The number of at most three digits that ``number`` is, within rounding."""
    if not 0 < number < math.inf:
        return None
    short = float(f"{number:.3g}")
    return short if abs(short - number) <= _OFF * number else None


class ScaledTerms:
    """Recognises terms that a loop may have multiplied by the loss scale, to add them to scaled gradients.

    Args:
        scales: Scales that the loop has asked for.
    """

    def __init__(self, scales: Iterable[float]) -> None:
        self._scales = scales
        self._tensors: dict[int, weakref.ref[Tensor]] = {}

    def multiplied(self, result: Tensor, factors: Iterable[object]) -> None:
        """Notes a tensor that is the product of ``factors``, if one of them is a number in units of the scale."""
        if any(isinstance(each, float) and self._is_in_units(each) for each in factors):
            self._tensors[id(result)] = weakref.ref(result)

    def __contains__(self, value: object) -> bool:
        """Whether a number is, or a tensor was multiplied by, a rounder number times the scale."""
        if isinstance(value, Tensor):
            known = self._tensors.get(id(value))
            return known is not None and known() is value
        return isinstance(value, float) and self._is_in_units(value)

    def clear(self) -> None:
        """A step is over."""
        self._tensors.clear()

    def _is_in_units(self, number: float) -> bool:
        return any(_digits(number / scale) < _digits(number) for scale in self._scales)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that a float holds."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < _LARGEST_INT and value is not True)


def is_one(ratio: float) -> bool:
    """Whether a ratio is that of two equal numbers."""
    return abs(ratio - 1) <= _ROUNDING


def is_count(ratio: float) -> bool:
    """Whether a ratio is a whole number, small enough for one of micro-batches."""
    whole = round(ratio) if 0.5 < ratio < _MOST_PARTS + 1 else 0
    return whole >= 1 and abs(ratio - whole) <= _ROUNDING * ratio


def is_round(number: float) -> bool:
    """Whether a number has three digits at most."""
    return 0 < number < math.inf and abs(float(f"{number:.3g}") - number) <= _ROUNDING * number


def _digits(number: float) -> float:
    """How many digits a round number has; infinitely many where it is none."""
    size = abs(number)
    return len(f"{size:.2e}".split("e")[0].replace(".", "").rstrip("0")) if is_round(size) else math.inf
