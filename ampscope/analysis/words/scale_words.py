"""Loss scales and counts in words."""

from __future__ import annotations

import math

from ampscope.analysis.words.number_words import number, power_of_two

#: Powers of two up to this one are written whole: a scale is doubled and halved, which is seen of all its digits.
_WHOLE = 31


def in_words(scale: float) -> str:
    """A loss scale for people: ``8,192 (2¹³)``."""
    if scale <= 0 or not math.isfinite(scale):
        return number(scale)
    exponent = math.log2(scale)
    if exponent != int(exponent):
        return number(scale)
    written = f"{int(scale):,}" if 0 <= exponent <= _WHOLE else number(scale)
    return f"{written} ({power_of_two(int(exponent))})"


def times(count: int) -> str:
    """``once``, ``twice``, ``5 times``."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")
