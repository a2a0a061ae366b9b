"""The folder of a framework's run: a new one for a new training, the same for its other ranks and when it resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.capture.torch_support import process_group
from ampscope.integrations import _framework_run
from ampscope.integrations._framework_run import run_folder
from ampscope.trace.manifest import Manifest, write_manifest


def begin(folder: Path) -> None:
    folder.mkdir()
    write_manifest(folder, Manifest())


def test_a_new_training_gets_a_new_folder(tmp_path: Path) -> None:
    assert run_folder(tmp_path).name == "ampscope"
    begin(tmp_path / "ampscope")
    assert run_folder(tmp_path).name == "ampscope-1"


def test_a_resumed_training_goes_on_in_the_newest(tmp_path: Path) -> None:
    assert run_folder(tmp_path, resume=True).name == "ampscope"
    begin(tmp_path / "ampscope")
    assert run_folder(tmp_path, resume=True).name == "ampscope"


def test_ranks_of_one_job_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store: dict[str, str] = {}
    monkeypatch.setattr(process_group, "rank_of", lambda: (0, 2))
    monkeypatch.setattr(process_group, "is_joined", lambda: True)
    monkeypatch.setattr(process_group, "agreed", store.setdefault)
    for expected in ("ampscope", "ampscope-1"):  # the second training of these processes is another run
        for _ in range(2):
            assert run_folder(tmp_path).name == expected, "the rank that was faster has begun already"
            if not (tmp_path / expected).exists():
                begin(tmp_path / expected)
            _framework_run._begun[tmp_path] -= 1  # the other rank has its own count
        _framework_run._begun[tmp_path] += 1
