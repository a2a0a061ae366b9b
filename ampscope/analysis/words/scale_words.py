"""Loss scales and counts in words."""

from __future__ import annotations

import math

#: From here on a number's digits say less than its size.
_LONG = 1e12


def in_words(scale: float) -> str:
    """A loss scale for people: ``8,192 (2^13)``."""
    if scale <= 0 or not math.isfinite(scale):
        return f"{scale:g}"
    exponent = math.log2(scale)
    number = f"{scale:,.0f}" if 1 <= scale < _LONG and scale == int(scale) else f"{scale:.3g}"
    return f"{number} (2^{exponent:.0f})" if exponent == int(exponent) else number


def times(count: int) -> str:
    """``once``, ``twice``, ``5 times``."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")
