"""Programs are trained in this process, and asked about on the command line."""

from __future__ import annotations

import pytest

from tests.support.command import Command
from tests.support.training.fixtures import quiet_process

__all__ = ["quiet_process"]


@pytest.fixture
def ampscope(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("COLUMNS", "120")
    return Command(monkeypatch, capsys)
