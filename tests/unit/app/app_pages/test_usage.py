from __future__ import annotations

import re

from tests.support.page_reading import Show


def test_a_loop_without_a_mistake_says_what_was_checked(seen: Show) -> None:
    words = seen("healthy", "usage", real=True).words
    assert re.search(r"\b1\d checks of the loop found no mistake\.", words)
    assert "After backward, gradients are unscaled before they are clipped" in words


def test_a_mistake_stands_with_its_fix_and_among_the_checks(seen: Show) -> None:
    words = seen("finding", "usage").words
    assert "1 mistake in how the loop uses autocast and the scaler." in words
    assert "clip_grad_norm_(model.parameters(), 1.0)" in words
    assert "scaler.unscale_(optimizer)" in words
    assert "The gradients are still multiplied by the loss scale" in words


def test_checks_of_a_scaler_do_not_apply_without_one(seen: Show) -> None:
    assert "no scaler in this run" in seen("finding", "usage").words
