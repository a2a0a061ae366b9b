"""What redraws itself while a page stays open."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import streamlit as st

from blocks import other_runs


@pytest.mark.parametrize(("now", "drawn"), [({"one": 1}, 0), ({"one": 1, "two": 2}, 1), ({}, 1)])
def test_the_page_is_drawn_again_when_other_runs_are_there(
    monkeypatch: pytest.MonkeyPatch, now: dict[str, int], drawn: int
) -> None:
    reruns: list[None] = []

    def fragment(function: Callable[[], None], run_every: float) -> Callable[[], None]:
        assert run_every == other_runs.LOOK_FOR_RUNS_EVERY
        return function

    monkeypatch.setattr(st, "fragment", fragment)
    monkeypatch.setattr(st, "rerun", lambda: reruns.append(None))
    other_runs.await_runs({"one": 0}, lambda: now)
    assert len(reruns) == drawn
