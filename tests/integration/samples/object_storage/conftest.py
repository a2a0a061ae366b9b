from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ampscope.trace import object_store
from ampscope.trace.object_store import Blocks
from ampscope.trace.upload.spool import VARIABLE
from tests.support.command import Command
from tests.support.stores.s3_server import S3Server, s3_server


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    """An S3 server with an empty bucket, which the environment names; who asks it waits for a third of a second."""
    with s3_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(VARIABLE, str(tmp_path / "spools"))
        monkeypatch.setattr(object_store, "_stores", {})
        monkeypatch.setattr(object_store, "_blocks", Blocks())
        monkeypatch.setattr(object_store, "_ANSWER_S", 0.3)
        yield server


@pytest.fixture
def ampscope_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)
