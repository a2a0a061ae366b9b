"""Limits as people write them."""

from __future__ import annotations

import pytest

from ampscope.analysis.diagnosis.gate_limits import Limits
from ampscope.errors import AmpscopeError


@pytest.mark.parametrize(("asked", "share"), [("1%", 0.01), ("0.5 %", 0.005), ("0.01", 0.01), (0, 0.0), ("100%", 1.0)])
def test_a_share_is_a_percentage_or_a_number(asked: str | float, share: float) -> None:
    assert Limits.asked(max_skipped=asked).max_skipped == pytest.approx(share)


@pytest.mark.parametrize("asked", ["3", "-1%", "some", "nan", "101%", ""])
def test_what_is_no_share_is_an_error(asked: str) -> None:
    with pytest.raises(AmpscopeError, match=r"write 1% or 0\.01"):
        Limits.asked(max_skipped=asked)


@pytest.mark.parametrize("asked", [-1.0, float("nan")])
def test_headroom_is_not_negative(asked: float) -> None:
    with pytest.raises(AmpscopeError, match="0 or more"):
        Limits.asked(min_headroom=asked)
