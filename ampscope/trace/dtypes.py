"""Lists the facts of each floating-point dtype, by torch's name for it: size, range and spacing."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FloatInfo:
    """The facts of a floating-point dtype, named as in ``torch.finfo``; exponents are base 2."""

    name: str
    bytes: int
    mantissa_bits: int
    normal: int  #: exponent of the smallest normal number
    top: int  #: first exponent that overflows
    max: float  #: largest finite magnitude

    @property
    def lowest(self) -> int:
        """Exponent of the smallest subnormal."""
        return self.normal - self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """The smallest normal number."""
        return 2.0**self.normal

    @property
    def smallest_subnormal(self) -> float:
        """The smallest number above 0."""
        return 2.0**self.lowest

    @property
    def eps(self) -> float:
        """Spacing of the numbers just above 1."""
        return 2.0**-self.mantissa_bits

    @property
    def is_half(self) -> bool:
        """Whether it is one of the two that autocast computes in."""
        return self.bytes == 2

    @property
    def survivor(self) -> float:
        """The smallest power of ten that is a normal number."""
        return float(f"1e{math.ceil(math.log10(self.smallest_normal))}")

    def vanishes(self, number: float) -> bool:
        """Whether a number other than zero becomes zero: half the smallest one does, as the even neighbour."""
        return 0 < abs(number) <= self.smallest_subnormal / 2

    def rounds_to_one(self, number: float) -> bool:
        """Whether a number just below 1 becomes 1: below it numbers lie half as far apart as above."""
        return number < 1 and 1 - number <= self.eps / 4

    def overflows(self, number: float) -> bool:
        """Whether a finite number becomes infinite: from half a spacing beyond the largest on."""
        return math.isfinite(number) and abs(number) >= self.max + self.eps * 2.0 ** (self.top - 2)


#: IEEE 754 binary16, bfloat16, binary32 and binary64; OCP OFP8 E4M3, which has no infinity, and E5M2.
FINFO = {
    one.name: one
    for one in (
        FloatInfo("float16", 2, 10, -14, 16, 65504.0),
        FloatInfo("bfloat16", 2, 7, -126, 128, (2 - 2.0**-7) * 2.0**127),
        FloatInfo("float32", 4, 23, -126, 128, (2 - 2.0**-23) * 2.0**127),
        FloatInfo("float64", 8, 52, -1022, 1024, (2 - 2.0**-52) * 2.0**1023),
        FloatInfo("float8_e4m3fn", 1, 3, -6, 9, 448.0),
        FloatInfo("float8_e5m2", 1, 2, -14, 16, 57344.0),
    )
}
#: The dtype of the real and imaginary parts of complex numbers.
PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
#: Largest finite magnitude of the 8-bit floating dtypes, by name.
FLOAT8 = {
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "float8_e4m3fnuz": 240.0,
    "float8_e5m2fnuz": 57344.0,
    "float8_e8m0fnu": 2.0**127,
}
#: Names of the half-precision dtypes.
HALF_DTYPES = frozenset(one.name for one in FINFO.values() if one.is_half)
