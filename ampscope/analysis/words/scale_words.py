"""Loss scales and counts in words."""

from __future__ import annotations

import math

from ampscope.analysis.words.number_words import number, power_of_two


def in_words(scale: float) -> str:
    """A loss scale for people: ``8,192 (2¹³)``."""
    if scale <= 0 or not math.isfinite(scale):
        return number(scale)
    exponent = math.log2(scale)
    return f"{number(scale)} ({power_of_two(int(exponent))})" if exponent == int(exponent) else number(scale)


def times(count: int) -> str:
    """``once``, ``twice``, ``5 times``."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")
