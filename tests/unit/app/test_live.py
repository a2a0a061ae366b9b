"""What redraws itself while a page stays open."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from tests.support.paths import APP


@pytest.mark.parametrize(("now", "drawn"), [({"one": 1}, 0), ({"one": 1, "two": 2}, 1), ({}, 1)])
def test_the_page_is_drawn_again_when_other_runs_are_there(
    monkeypatch: pytest.MonkeyPatch, now: dict[str, int], drawn: int
) -> None:
    monkeypatch.syspath_prepend(APP)
    live = importlib.import_module("blocks.frame.live")
    reruns: list[None] = []

    def fragment(function: Callable[[], None], run_every: float) -> Callable[[], None]:
        assert run_every == live.LOOK_FOR_RUNS_EVERY
        return function

    monkeypatch.setattr(live.st, "fragment", fragment)
    monkeypatch.setattr(live.st, "rerun", lambda: reruns.append(None))
    live.await_runs({"one": 0}, lambda: now)
    assert len(reruns) == drawn
