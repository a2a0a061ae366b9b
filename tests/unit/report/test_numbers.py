"""Numbers as a terminal and a page say them."""

from __future__ import annotations

import math

import pytest

from ampscope.report import numbers
from tests.support.verdicts.by_hand import PRODUCT, QUERY
from tests.support.verdicts.operands import changed


def test_a_difference_has_its_sign() -> None:
    assert [numbers.signed(each) for each in (0.0012345, -70000.0, 0.0)] == ["+0.0012", "-70,000", "+0"]


def test_span() -> None:
    assert numbers.span(-1.0, math.inf) == "-1 to inf"
    assert numbers.span(2.0, 2.0) == "2"
    assert numbers.span(math.nan, math.nan) == "NaN"
    assert numbers.span(None, 1.0) == ""


def test_what_is_not_finite_is_counted_or_told_from_the_bounds() -> None:
    assert numbers.nonfinite(QUERY) == ""
    assert numbers.nonfinite(changed(PRODUCT, nan=2, neginf=1)) == "2 NaN, 4 inf, 1 -inf"
    assert numbers.nonfinite(changed(PRODUCT, posinf=None)) == "inf"
    assert numbers.nonfinite(changed(PRODUCT, posinf=None, min=math.nan, max=math.nan)) == "NaN"


def test_what_was_not_measured_is_said_as_the_caller_wants() -> None:
    for say in (numbers.value, numbers.share, numbers.seconds):
        assert say(None) == ""
        assert say(None, missing="unknown") == "unknown"
    assert numbers.span(None, 1.0, missing="not measured") == "not measured"
    assert numbers.part(None, 8, missing="not measured") == "not measured"


def test_a_share_has_the_same_digits_in_a_column_of_a_terminal_and_on_a_page() -> None:
    shares = (0.0, 0.0001, 0.0123, 0.5678, 1.0)
    assert [numbers.share(share) for share in shares] == ["0 %", "under 0.1 %", "1.2 %", "57 %", "100 %"]
    assert [numbers.share(share, narrow=True) for share in shares] == ["0%", "<0.1%", "1.2%", "57%", "100%"]


def test_a_part_is_a_count_with_its_share() -> None:
    assert [numbers.part(part, 10_000) for part in (0, 1, 2500)] == ["none", "1 (under 0.1 %)", "2,500 (25 %)"]
    assert numbers.part(3, None) == "3"


def test_count() -> None:
    assert [numbers.count(number, "step") for number in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
    assert numbers.count(41_873) == "41,873"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0012, "1.2 ms"),
        (0.4, "400 ms"),
        (2.5, "2.5 s"),
        (23, "23 s"),
        (187, "3 min 7 s"),
        (7503, "2 h 5 min"),
        (math.nan, "nan s"),
    ],
)
def test_how_long_something_took(seconds: float, words: str) -> None:
    assert numbers.seconds(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 seconds ago"),
        (61, "1 minute ago"),
        (7200, "2 hours ago"),
        (6 * 86400, "6 days ago"),
        (-3, "0 seconds ago"),
    ],
)
def test_how_long_ago_something_was(seconds: float, words: str) -> None:
    assert numbers.ago(seconds) == words
    assert numbers.since(0.0, seconds) == words


def test_what_was_long_ago_has_a_date_in_the_readers_time_zone() -> None:
    assert numbers.since(1.7e9, 1.8e9) == f"on {numbers.moment(1.7e9)[:10]}"


def test_size() -> None:
    sizes = (0, 1023, 1536, 200 * 1024, 3 * 2**20, 5 * 2**30, 2**50)
    words = ["0 B", "1,023 B", "1.5 KiB", "200 KiB", "3 MiB", "5 GiB", "1,024 TiB"]
    assert [numbers.size(size) for size in sizes] == words
