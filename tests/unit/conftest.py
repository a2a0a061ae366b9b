"""The command line for the tests of every room."""

from __future__ import annotations

import pytest

from tests.support.command import Command


@pytest.fixture
def ampscope(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("COLUMNS", "120")
    return Command(monkeypatch, capsys)
