"""Numbers in the terminal."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ampscope.report import numbers
from tests.support.cli_verdicts import PRODUCT, QUERY


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, ""),
        (0.0, "0"),
        (-0.0, "-0"),
        (65504.0, "65,504"),
        (65504.5, "6.55e+04"),
        (1e9, "1e+09"),
        (5.96e-8, "5.96e-08"),
        (0.125, "0.125"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "NaN"),
    ],
)
def test_value(number: float | None, text: str) -> None:
    assert numbers.value(number) == text


def test_span() -> None:
    assert numbers.span(-1.0, math.inf) == "-1 to inf"
    assert numbers.span(2.0, 2.0) == "2"
    assert numbers.span(math.nan, math.nan) == "NaN"
    assert numbers.span(None, 1.0) == ""


def test_what_is_not_finite_is_counted_or_told_from_the_bounds() -> None:
    assert numbers.nonfinite(QUERY) == ""
    assert numbers.nonfinite(replace(PRODUCT, nan=2, neginf=1)) == "2 NaN, 4 inf, 1 -inf"
    assert numbers.nonfinite(replace(PRODUCT, posinf=None)) == "inf"
    assert numbers.nonfinite(replace(PRODUCT, posinf=None, min=math.nan, max=math.nan)) == "NaN"


def test_share() -> None:
    assert [numbers.share(part, 10_000) for part in (None, 0, 1, 123, 10_000)] == ["", "0%", "<0.1%", "1.23%", "100%"]
    assert numbers.share(1, None) == ""


def test_count() -> None:
    assert [numbers.count(number, "step") for number in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


@pytest.mark.parametrize(
    ("seconds", "words"), [(None, ""), (0.4, "0 s"), (23, "23 s"), (187, "3 min 7 s"), (7503, "2 h 5 min")]
)
def test_how_long_a_run_lasted(seconds: float | None, words: str) -> None:
    assert numbers.lasted(seconds) == words
