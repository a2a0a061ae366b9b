"""Loops are trained in this process; see `tests.support.training.fixtures`."""

from __future__ import annotations

import math

import pytest

from ampscope.capture import budgets
from tests.support.training.fixtures import quiet_process

__all__ = ["quiet_process"]


@pytest.fixture
def replays_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told of a mistake does not depend on how long replays take on a busy machine."""
    monkeypatch.setattr(budgets, "FREE_REPLAY_SECONDS", math.inf)
