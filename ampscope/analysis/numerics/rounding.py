"""What becomes of a constant in a floating dtype: whether an eps vanishes, a bound rounds away, a literal overflows."""

from __future__ import annotations

import math
import struct

import numpy as np

from ampscope.trace.dtypes import FINFO

_TRAINING = {name: FINFO[name] for name in ("float16", "bfloat16", "float32", "float64")}
#: Largest finite magnitude, smallest normal and smallest number of the dtypes training computes in.
LARGEST = {name: info.max for name, info in _TRAINING.items()}
SMALLEST_NORMAL = {name: info.smallest_normal for name, info in _TRAINING.items()}
SMALLEST = {name: info.smallest_subnormal for name, info in _TRAINING.items()}
#: Spacing of the dtype's numbers just above 1.
EPSILON = {name: info.eps for name, info in _TRAINING.items()}
#: Whole numbers up to this are all held.
WHOLE = {name: round(2 / info.eps) for name, info in _TRAINING.items()}


def rounded(value: float, dtype: str) -> float:
    """``value`` rounded to ``dtype`` (to nearest even); unchanged for dtypes that lose nothing here."""
    with np.errstate(over="ignore"):
        if dtype == "float16":
            return float(np.float16(value))
        if dtype == "float32":
            return float(np.float32(value))
        if dtype == "bfloat16":
            return _bfloat16(value)
    return value


def _bfloat16(value: float) -> float:
    single = float(np.float32(value))
    if not math.isfinite(single):
        return single
    (bits,) = struct.unpack("<I", struct.pack("<f", single))
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def vanishes(value: float, dtype: str) -> bool:
    """Whether a non-zero constant becomes 0 in ``dtype``."""
    return value != 0.0 and rounded(value, dtype) == 0.0


def rounds_to_one(value: float, dtype: str) -> bool:
    """Whether a bound just below 1 becomes exactly 1 in ``dtype``."""
    return value != 1.0 and rounded(value, dtype) == 1.0


def overflows(value: float, dtype: str) -> bool:
    """Whether a finite constant does not fit ``dtype``."""
    return abs(value) != float("inf") and abs(rounded(value, dtype)) == float("inf")


def safe_eps(dtype: str) -> float:
    """A positive constant that survives in ``dtype`` with room for a square or a reciprocal: its smallest normal."""
    return SMALLEST_NORMAL.get(dtype, 1e-12)
