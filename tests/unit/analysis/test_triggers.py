"""Each trigger of an incident is told in words of its own."""

from __future__ import annotations

import pytest

from ampscope.analysis.triggers import TRIGGERS, words_of
from ampscope.trace.schema import Trigger


def test_every_trigger_is_told() -> None:
    assert TRIGGERS.keys() == set(Trigger)
    for name in ("noticed", "effect"):
        told = [getattr(words, name) for words in TRIGGERS.values()]
        assert all(told)
        assert len(set(told)) == len(told), name


@pytest.mark.parametrize("trigger", ["", "of a later version"])
def test_one_that_is_not_known_is_told_without_saying_what_it_is(trigger: str) -> None:
    words = words_of(trigger)
    assert (words.noticed, words.effect) == ("", "went wrong")
    assert not words.each_step
