"""Where a number format ends: what rounds to infinity, to zero, or to a subnormal number, to nearest even."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.trace.dtypes import FINFO


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
        """What lies above overflows, and where `tie_fits` is not set, this too: half a spacing above the largest."""
        top = next(power for power in range(1100) if 2.0**power > self.largest) - 1
        return self.largest + 2.0 ** (top - self.mantissa_bits - 1)

    @property
    def flushed(self) -> float:
        """The largest magnitude that is rounded to zero: half the smallest subnormal, which is a tie."""
        return 2.0 ** (self.lowest - 1)

    @property
    def subnormal(self) -> float:
        """What lies below, and is not flushed, becomes subnormal; this itself, a tie, is rounded up to a normal."""
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
