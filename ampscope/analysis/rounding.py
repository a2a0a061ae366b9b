"""Number formats: their names and sizes, where they end, and what becomes of a constant in one."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

from ampscope.trace.dtypes import FINFO
from ampscope.trace.schema import SiteRow

_OTHER_SIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}


def plain(dtype: str) -> str:
    """The dtype's name without torch's prefix."""
    return dtype.removeprefix("torch.")


def itemsize(dtype: str) -> int:
    """Bytes of one element; 8 for a dtype that is not known here."""
    name = plain(dtype)
    return FINFO[name].bytes if name in FINFO else _OTHER_SIZES.get(name, 8)


def is_floating(dtype: str) -> bool:
    """Whether the dtype holds real or complex floating-point numbers."""
    return plain(dtype).startswith(("float", "bfloat", "complex"))


def ran_in(site: SiteRow) -> str:
    """The dtype an op computed in: its first floating output's, else its first floating operand's, else empty."""
    return next((plain(dtype) for dtype in (*site.out_dtypes, *site.in_dtypes) if is_floating(dtype)), "")


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A floating-point format, and the magnitudes from which on a number is not what it was; exponents are base 2.

    A cast rounds to nearest even and keeps subnormals, as CPUs and GPUs do.
    """

    name: str
    mantissa_bits: int
    normal: int  #: exponent of the smallest normal number
    largest: float  #: largest finite magnitude
    tie_fits: bool  #: whether what lies half a spacing above the largest is rounded down to it

    @property
    def lowest(self) -> int:
        """Exponent of the smallest subnormal."""
        return self.normal - self.mantissa_bits

    @property
    def overflow(self) -> float:
        """The magnitude above which numbers overflow, half a spacing above the largest.

        A number of just this magnitude overflows too, unless `tie_fits` is set.
        """
        top = next(power for power in range(1100) if 2.0**power > self.largest) - 1
        return self.largest + 2.0 ** (top - self.mantissa_bits - 1)

    @property
    def flushed(self) -> float:
        """The largest magnitude that is rounded to zero: half the smallest subnormal, which is a tie."""
        return 2.0 ** (self.lowest - 1)

    @property
    def subnormal(self) -> float:
        """The magnitude below which numbers that are not flushed become subnormal.

        A number of just this magnitude, a tie, is rounded up to a normal one.
        """
        return 2.0**self.normal - 2.0 ** (self.lowest - 1)


def _of(name: str, *, tie_fits: bool = False) -> NumberFormat:
    info = FINFO[name]
    return NumberFormat(name, info.mantissa_bits, info.normal, info.max, tie_fits)


#: The formats of a precision plan. The mantissa of float8_e4m3fn's largest number is even, as its NaN takes the next;
#: that of the others is odd. TF32 is float32 with float16's mantissa.
FORMATS = {
    one.name: one
    for one in (
        _of("float16"),
        _of("bfloat16"),
        NumberFormat("tf32", 10, FINFO["float32"].normal, (2 - 2.0**-10) * 2.0**127, tie_fits=False),
        _of("float8_e4m3fn", tie_fits=True),
        _of("float8_e5m2"),
    )
}


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
