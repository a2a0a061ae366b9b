"""Numbers are written one way, wherever they stand."""

from __future__ import annotations

import math

import pytest

from ampscope.analysis.words import in_words, power_of_two
from ampscope.numerals import in_code, number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "-0"),
        (0.125, "0.125"),
        (-86.1234, "-86.12"),
        (999.99, "1,000"),
        (65504.0, "65,504"),
        (70920.25, "70,920"),
        (-59648.0, "-59,648"),
        (999_999.7, "1e6"),
        (1e9, "1e9"),
        (1_234_567.0, "1.235e6"),
        (0.0001, "0.0001"),
        (5.96e-8, "5.96e-8"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "NaN"),
    ],
)
def test_a_number(value: float, text: str) -> None:
    assert number(value) == text


def test_what_is_not_one_is_not_written_as_one() -> None:
    assert number(1.0) == "1"
    assert number(1 - 2.0**-20) == "0.999999"
    assert number(-1.0000001) == "-1.0000001"


def test_more_digits_tell_more_of_every_number_but_whole_ones_have_all_theirs() -> None:
    assert [number(70920.25, digits) for digits in (3, 6, 17)] == ["70,920", "70,920.2", "70,920.25"]
    assert number(0.123456, 2) == "0.12"


def test_code_reads_it_back() -> None:
    for value in (70920.0, 6.104e-5, 1e-12, 0.5, 3e38):
        assert float(in_code(value)) == value


def test_a_power_of_two_is_raised() -> None:
    assert [power_of_two(exponent) for exponent in (15, -24)] == ["2\u00b9\u2075", "2\u207b\u00b2\u2074"]


@pytest.mark.parametrize(
    ("scale", "text"),
    [(512.0, "512 (2\u2079)"), (2.0**-25, "2.98e-8 (2\u207b\u00b2\u2075)"), (3000.0, "3,000"), (0.0, "0")],
)
def test_a_loss_scale_that_is_a_power_of_two_says_so(scale: float, text: str) -> None:
    assert in_words(scale) == text


@pytest.mark.parametrize(
    ("scale", "words"),
    [(512.0, "512 (2⁹)"), (2.0**21, "2,097,152 (2²¹)"), (2.0**40, "1.1e12 (2⁴⁰)"), (0.25, "0.25 (2⁻²)"), (3e6, "3e6")],
)
def test_a_loss_scale_shows_its_digits_and_its_power(scale: float, words: str) -> None:
    assert in_words(scale) == words
