"""What becomes of constants in the dtypes of training; the bit patterns are known by hand."""

from __future__ import annotations

import math
import struct

import pytest

from ampscope.analysis.rounding import (
    EPSILON,
    LARGEST,
    SMALLEST,
    SMALLEST_NORMAL,
    overflows,
    rounded,
    rounds_to_one,
    safe_eps,
    vanishes,
)

DTYPES = ("float16", "bfloat16", "float32")


@pytest.mark.parametrize(
    ("value", "dtype", "gone"),
    [
        (1e-8, "float16", True),
        (1e-8, "bfloat16", False),
        (1e-8, "float32", False),
        (6e-8, "float16", False),  # the smallest subnormal
        (2.0**-25, "float16", True),  # half of it: a tie, and 0 is even
        (-1e-8, "float16", True),
        (1e-12, "bfloat16", False),
        (1e-4, "float16", False),
        (1e-5, "float16", False),
        (1e-45, "float32", False),
        (1e-46, "float32", True),
        (1e-41, "bfloat16", True),
        (0.0, "float16", False),
        (1e-300, "float64", False),
    ],
)
def test_a_small_constant_vanishes_or_stays(value: float, dtype: str, gone: bool) -> None:
    assert vanishes(value, dtype) is gone


@pytest.mark.parametrize(
    ("value", "dtype", "is_one"),
    [
        (1 - 1e-4, "float16", True),
        (0.999, "float16", False),
        (1 - 2.0**-12, "float16", True),  # a tie, and 1 is even
        (1 - 2.0**-11, "float16", False),
        (0.999, "bfloat16", True),
        (0.99, "bfloat16", False),
        (1 - 1e-7, "float32", False),
        (1 - 1e-8, "float32", True),
        (1 + 1e-4, "float16", True),
        (1.0, "float16", False),
        (1 - 1e-8, "float64", False),
    ],
)
def test_a_bound_just_below_one_is_one_or_not(value: float, dtype: str, is_one: bool) -> None:
    assert rounds_to_one(value, dtype) is is_one


@pytest.mark.parametrize(
    ("value", "dtype", "too_large"),
    [
        (65504.0, "float16", False),
        (65519.9, "float16", False),
        (65520.0, "float16", True),
        (-1e9, "float16", True),
        (-1e4, "float16", False),
        (-1e9, "bfloat16", False),
        (3.3895313892515355e38, "bfloat16", False),
        (3.4e38, "bfloat16", True),
        (3.4e38, "float32", False),
        (1e39, "float32", True),
        (-1e39, "bfloat16", True),
        (math.inf, "float16", False),
        (-math.inf, "bfloat16", False),
        (1e308, "float64", False),
    ],
)
def test_a_constant_fits_or_overflows(value: float, dtype: str, too_large: bool) -> None:
    assert overflows(value, dtype) is too_large


@pytest.mark.parametrize(
    ("bits", "becomes"),
    [
        (0x3F800000, 0x3F80),  # 1
        (0x3F807FFF, 0x3F80),  # below the tie
        (0x3F808000, 0x3F80),  # a tie goes to the even 0x3f80
        (0x3F818000, 0x3F82),  # and to the even 0x3f82
        (0x3F808001, 0x3F81),  # above the tie
        (0x40490FDB, 0x4049),  # pi is 3.140625
        (0x3FFFFFFF, 0x4000),  # carries into the exponent
        (0xC0490FDB, 0xC049),  # the sign stays
        (0x00010000, 0x0001),  # the smallest subnormal
        (0x7F7F0000, 0x7F7F),  # the largest
        (0x7F7F8000, 0x7F80),  # rounds to infinity
    ],
)
def test_bfloat16_rounds_to_nearest_even(bits: int, becomes: int) -> None:
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    (expected,) = struct.unpack("<f", struct.pack("<I", becomes << 16))
    assert rounded(value, "bfloat16") == expected


@pytest.mark.parametrize(
    ("value", "dtype", "becomes"),
    [
        (0.1, "float16", 0.0999755859375),
        (2049.0, "float16", 2048.0),
        (2051.0, "float16", 2052.0),
        (65520.0, "float16", math.inf),
        (257.0, "bfloat16", 256.0),
        (16777217.0, "float32", 16777216.0),
        (0.1, "float64", 0.1),
        (3.0, "int64", 3.0),
    ],
)
def test_known_roundings(value: float, dtype: str, becomes: float) -> None:
    assert rounded(value, dtype) == becomes


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(dtype: str) -> None:
    assert rounded(math.inf, dtype) == math.inf
    assert rounded(-math.inf, dtype) == -math.inf
    assert math.isnan(rounded(math.nan, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_limits_of_a_dtype_are_its_own_numbers(dtype: str) -> None:
    for limit in (LARGEST, SMALLEST, SMALLEST_NORMAL):
        assert rounded(limit[dtype], dtype) == limit[dtype]
    assert rounded(1 + EPSILON[dtype], dtype) == 1 + EPSILON[dtype]
    assert rounded(1 + EPSILON[dtype] / 2, dtype) == 1.0
    assert overflows(LARGEST[dtype] * (1 + EPSILON[dtype]), dtype)
    assert vanishes(SMALLEST[dtype] / 2, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_safe_eps_survives_and_so_does_its_reciprocal(dtype: str) -> None:
    eps = safe_eps(dtype)
    assert rounded(eps, dtype) == eps > 0
    assert not overflows(1 / eps, dtype)
