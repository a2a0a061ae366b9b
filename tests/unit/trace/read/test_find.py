from __future__ import annotations

import os
from pathlib import Path

import pytest

from ampscope.errors import RunNotFound
from ampscope.trace.manifest import Manifest, write_manifest
from ampscope.trace.read import find
from ampscope.trace.read.find import runs_around
from ampscope.trace.read.run import find_runs, open_run
from ampscope.trace.schema import MANIFEST


def run(folder: Path, created: float = 1.0) -> Path:
    folder.mkdir(parents=True)
    write_manifest(folder, Manifest(created=created))
    return folder


def test_a_run_is_itself(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    run(folder / "nested")
    assert find_runs(folder) == [folder]
    assert open_run(folder).path == folder


def test_newest_first_one_and_two_levels_deep(tmp_path: Path) -> None:
    old, new, middle = run(tmp_path / "a", 1), run(tmp_path / "b" / "c", 3), run(tmp_path / "d", 2)
    run(tmp_path / "e" / "f" / "g", 4)
    assert find_runs(str(tmp_path)) == [new, middle, old]


def test_nothing(tmp_path: Path) -> None:
    assert find_runs(tmp_path) == []
    assert find_runs(tmp_path / "missing") == []


def test_another_programs_run_json_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / MANIFEST).write_text('{"id": 7}')
    assert find_runs(tmp_path) == []


def test_a_damaged_run_is_still_found(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    (folder / "rank=0").mkdir()
    (folder / MANIFEST).write_text("{")
    assert find_runs(tmp_path) == [folder]


def test_the_only_run_below_is_opened(tmp_path: Path) -> None:
    folder = run(tmp_path / "a" / "b")
    assert open_run(tmp_path).path == folder
    assert open_run(folder / MANIFEST).path == folder


def test_several_runs_are_named(tmp_path: Path) -> None:
    for number in range(7):
        run(tmp_path / f"run{number}", number)
    with pytest.raises(RunNotFound) as caught:
        open_run(tmp_path)
    message = str(caught.value)
    assert "7 runs" in message
    assert message.index("run6") < message.index("run2")
    assert "run1" not in message
    assert "2 more" in message


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="no run in"):
        open_run(tmp_path)
    with pytest.raises(RunNotFound, match="does not exist"):
        open_run(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunNotFound, match="is a file"):
        open_run(tmp_path / "file")


class TestAround:
    """Where somebody works who names no run."""

    def test_as_deep_as_lightning_logs_newest_first(self, tmp_path: Path) -> None:
        old, new = run(tmp_path / "lightning_logs/version_0/ampscope", 1), run(tmp_path / "ampscope", 2)
        run(tmp_path / "a/b/c/d", 3)
        assert runs_around(tmp_path) == [new, old]

    def test_hidden_folders_and_links_are_passed_over(self, tmp_path: Path) -> None:
        run(tmp_path / ".cache" / "run")
        (tmp_path / "work").mkdir()
        (tmp_path / "work" / "link").symlink_to(tmp_path / ".cache")
        assert runs_around(tmp_path / "work") == runs_around(tmp_path) == []

    def test_a_large_folder_is_looked_through_in_part(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for number in range(9):
            run(tmp_path / f"run{number}")
        monkeypatch.setattr(find, "_MOST_ENTRIES", 4)
        assert len(runs_around(tmp_path)) == 4

    def test_a_slow_one_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run(tmp_path / "run")
        monkeypatch.setattr(find, "_MOST_SECONDS", 0.0)
        assert runs_around(tmp_path) == []

    def test_folders_that_may_not_be_looked_into_are_passed_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mine, locked = run(tmp_path / "mine"), run(tmp_path / "locked")
        stat = os.stat

        def refusing(path: str | Path, **options: bool) -> os.stat_result:
            if Path(path) == locked / MANIFEST:
                raise PermissionError(13, "Permission denied", str(path))
            return stat(path, **options)

        monkeypatch.setattr(os, "stat", refusing)
        assert runs_around(tmp_path) == [mine]
