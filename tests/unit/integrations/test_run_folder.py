"""The folder of a framework's run: a new one for a new training, the same for its other ranks and when it resumes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ampscope.integrations import _run_folder
from ampscope.integrations._run_folder import run_folder
from ampscope.trace.manifest import Manifest, write_manifest


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_run_folder, "_used", set())
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def begin(folder: Path, *, created: float | None = None) -> None:
    folder.mkdir()
    write_manifest(folder, Manifest(created=time.time() if created is None else created))


def test_a_new_training_gets_a_new_folder(tmp_path: Path) -> None:
    assert run_folder(tmp_path).name == "ampscope"
    begin(tmp_path / "ampscope")
    assert run_folder(tmp_path).name == "ampscope-1"


def test_a_resumed_training_goes_on_in_the_newest(tmp_path: Path) -> None:
    assert run_folder(tmp_path, resume=True).name == "ampscope"
    begin(tmp_path / "ampscope")
    assert run_folder(tmp_path, resume=True).name == "ampscope"


def test_ranks_of_one_job_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    begin(tmp_path / "ampscope", created=1.0)  # an earlier job's
    assert run_folder(tmp_path).name == "ampscope-1"
    monkeypatch.setattr(_run_folder, "_used", set())
    begin(tmp_path / "ampscope-1")  # the other rank was faster
    assert run_folder(tmp_path).name == "ampscope-1"
    assert run_folder(tmp_path).name == "ampscope-2", "the next training of these processes is another run"
