"""Compaction beside a process that writes the run: it touches nothing of it, and does not stand in its way."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampscope.trace import compaction
from ampscope.trace.compaction import compact
from ampscope.trace.files import folder_lock
from ampscope.trace.files.folder_lock import FolderLock, is_locked
from ampscope.trace.manifest import read_manifest, write_manifest
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Table
from tests.support.trace_builder import TraceBuilder
from tests.unit.trace.many_parts import age, files_of, many_parts, what_is_read


def compacted(folder: Path, **asked: Any) -> Any:
    (run,) = compact([folder], **{"age": 0.0, **asked}).runs
    return run


def names(folder: Path, rank: int) -> list[str]:
    return [name for name in files_of(folder) if name.startswith(f"rank={rank}/")]


def test_the_rank_that_is_written_is_left_alone_and_the_others_are_not(run_folder: Path) -> None:
    many_parts(run_folder, died=False)
    trace = TraceBuilder(run_folder, rank=1)
    trace.step()
    trace.leave_open()
    before, own = what_is_read(run_folder), names(run_folder, 1)
    done = compacted(run_folder)
    assert [(Path(left.path).name, left.failed) for left in done.left_alone] == [("rank=1", False)]
    assert "being written by a process" in done.left_alone[0].why
    assert names(run_folder, 1) == own
    assert len(names(run_folder, 0)) < len(own) // 2
    assert what_is_read(run_folder) == before
    trace.close()


def test_an_interrupted_run_that_may_have_a_writer_elsewhere(run_folder: Path) -> None:
    """Its last row came a moment ago; locks of other machines are not always told."""
    many_parts(run_folder)
    write_manifest(run_folder, replace(read_manifest(run_folder), closed=None))
    before = files_of(run_folder)
    assert {left.failed for left in compacted(run_folder).left_alone} == {False}
    assert files_of(run_folder) == before
    age(run_folder)
    assert compacted(run_folder).left_alone == ()
    with open_run(run_folder) as run:
        assert run.status == "interrupted"


def test_a_writer_that_comes_waits_until_it_has_the_lock(run_folder: Path) -> None:
    many_parts(run_folder, ranks=1)
    lock = FolderLock(run_folder / "rank=0", tidying=True)
    assert not is_locked(run_folder / "rank=0"), "a reader sees no writer"
    found: list[TraceBuilder] = []
    thread = threading.Thread(target=lambda: found.append(TraceBuilder(run_folder)))
    thread.start()
    thread.join(10 * folder_lock._PAUSE_S)
    assert not found
    lock.release()
    thread.join(60)
    found[0].close()


def test_a_lock_that_is_held_by_a_writer_is_not_waited_for(run_folder: Path) -> None:
    """Though the one before it was killed as it tidied up, and left its word in the file."""
    run_folder.mkdir()
    (run_folder / folder_lock.LOCK_FILE).write_bytes(b"tidying")
    lock = FolderLock(run_folder)
    assert is_locked(run_folder)
    with pytest.raises(BlockingIOError):
        FolderLock(run_folder)
    lock.release()


def test_a_writer_that_comes_in_between_gets_the_run(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is given away between two merges; what is merged by then is, and the rest is the writer's."""
    many_parts(run_folder, ranks=1, died=False)
    monkeypatch.setattr(compaction, "_HELD_S", 0.0)
    came: list[TraceBuilder] = []

    def come(_: float) -> None:
        if not came:
            came.append(TraceBuilder(run_folder))

    monkeypatch.setattr(time, "sleep", come)
    before = what_is_read(run_folder)["rows"]
    done = compacted(run_folder)
    assert [left.failed for left in done.left_alone] == [False]
    assert done.after.files > 20, "most of it is as it was"
    assert what_is_read(run_folder)["rows"] == before
    came[0].step()
    came[0].close()
    assert compacted(run_folder).left_alone == ()
    with open_run(run_folder) as run:
        assert len(run.rows(Table.STEPS)) == before["steps"].count("StepRow(") + 1


def test_a_lock_that_is_given_away_and_not_taken(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many_parts(run_folder)
    monkeypatch.setattr(compaction, "_HELD_S", 0.0)
    given: list[float] = []
    monkeypatch.setattr(time, "sleep", given.append)
    before = what_is_read(run_folder)
    done = compacted(run_folder)
    assert what_is_read(run_folder) == before
    assert len(given) > 20
    assert done.after.files == 22


def test_a_file_system_without_locks(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many_parts(run_folder, ranks=1)

    def unknown(*_: Any, **__: Any) -> bool:
        raise OSError("no locks here")

    monkeypatch.setattr(folder_lock, "_try_lock", unknown)
    before = files_of(run_folder)
    (left,) = compacted(run_folder).left_alone
    assert (left.failed, "knows no locks" in left.why) == (True, True)
    assert files_of(run_folder) == before


def test_an_older_run_of_which_a_rank_is_written(run_folder: Path) -> None:
    """Its manifest is the writers'."""
    many_parts(run_folder, died=False)
    trace = TraceBuilder(run_folder, rank=1)
    write_manifest(run_folder, replace(read_manifest(run_folder), schema=2))
    before = files_of(run_folder)
    assert [Path(left.path).name for left in compacted(run_folder).left_alone] == ["rank=1"]
    assert files_of(run_folder) == before
    assert read_manifest(run_folder).schema == 2
    trace.close()
