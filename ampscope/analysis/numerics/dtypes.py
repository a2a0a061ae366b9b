"""The dtypes that a trace names: their sizes, and which one an op computed in."""

from __future__ import annotations

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
