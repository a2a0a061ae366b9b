"""What is told of a mistake does not depend on how long replays take on a busy machine."""

from __future__ import annotations

import math

import pytest

from ampscope.capture import budgets


@pytest.fixture(autouse=True)
def replays_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "FREE_REPLAY_SECONDS", math.inf)
