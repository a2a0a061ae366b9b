"""Calls the command line in this process, through the same door as a shell."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from ampscope.cli.main import main


@dataclass(frozen=True)
class Answer:
    """What a shell would see."""

    code: int
    out: str
    err: str


class Command:
    """``command("diagnose", path)`` is ``ampscope diagnose path`` in a shell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capture = capture

    def __call__(self, *arguments: object) -> Answer:
        self._monkeypatch.setattr(sys, "argv", ["ampscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = self._capture.readouterr()
        assert end.value.code is None or isinstance(end.value.code, int)
        return Answer(end.value.code or 0, out, err)
