"""Floating-point formats: their names, sizes and ranges as powers of two."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.trace.schema import SiteRow


@dataclass(frozen=True, slots=True)
class Format:
    """The range of a floating-point dtype; exponents are base 2."""

    name: str
    bytes: int
    lowest: int  #: exponent of the smallest subnormal
    normal: int  #: exponent of the smallest normal number
    top: int  #: first exponent that overflows


#: IEEE 754 binary16, bfloat16, binary32 and binary64; OCP OFP8 E4M3 and E5M2.
FORMATS = {
    one.name: one
    for one in (
        Format("float16", 2, -24, -14, 16),
        Format("bfloat16", 2, -133, -126, 128),
        Format("float32", 4, -149, -126, 128),
        Format("float64", 8, -1074, -1022, 1024),
        Format("float8_e4m3fn", 1, -9, -6, 9),
        Format("float8_e5m2", 1, -16, -14, 16),
    )
}
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
    return FORMATS[name].bytes if name in FORMATS else _OTHER_SIZES.get(name, 8)


def is_floating(dtype: str) -> bool:
    """Whether the dtype holds real or complex floating-point numbers."""
    return plain(dtype).startswith(("float", "bfloat", "complex"))


def ran_in(site: SiteRow) -> str:
    """The dtype an op computed in: its first floating output's, else its first floating operand's, else empty."""
    return next((plain(dtype) for dtype in (*site.out_dtypes, *site.in_dtypes) if is_floating(dtype)), "")
