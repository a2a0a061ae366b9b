"""Files that somebody has open, as Windows minds them: renaming waits for a moment, removing is left for later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ampscope.trace.compaction import compact
from ampscope.trace.files import whole_files
from ampscope.trace.files.layout import list_table, table_folder
from ampscope.trace.files.whole_files import remove, write_whole
from ampscope.trace.manifest import Manifest
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Table
from ampscope.trace.write.writer import TraceWriter
from ampscope.trace.write.writing_threads import SealAt
from tests.support.trace_builder import TraceBuilder


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_files, "_IS_WINDOWS", True)
    monkeypatch.setattr(whole_files, "_PAUSE_S", 0.0)


def _renew(path: Path) -> None:
    path.write_text("new")


def refusing(times: int) -> Any:
    left = [times]

    def refuse(path: Path, *arguments: Any, real: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise PermissionError(13, "The process cannot access the file: it is being used by another process")
        return real(path, *arguments, **named)

    return refuse


def played(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
    real, refuse = getattr(Path, name), refusing(times)
    monkeypatch.setattr(Path, name, lambda path, *given, **named: refuse(path, *given, real=real, **named))


def test_a_file_that_is_open_for_a_moment_gets_its_new_content(
    windows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("old")
    played(monkeypatch, "replace", whole_files._ATTEMPTS - 1)
    write_whole(tmp_path / "file", _renew)
    assert (tmp_path / "file").read_text() == "new"


def test_one_that_stays_open_is_as_it_was(windows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")
    played(monkeypatch, "replace", 10_000)
    with pytest.raises(PermissionError):
        write_whole(tmp_path / "file", _renew)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_elsewhere_a_refusal_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")
    played(monkeypatch, "unlink", 1)
    with pytest.raises(PermissionError):
        remove(tmp_path / "file")
    assert remove(tmp_path / "file")
    assert remove(tmp_path / "file"), "it is gone already"


def test_a_writer_whose_files_a_reader_has_open_goes_on(
    windows: None, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Journals and merged parts stay for a while; what is read is the same, and the next writer clears up."""
    row = TraceBuilder(run_folder).step()
    with monkeypatch.context() as patch:
        played(patch, "unlink", 10_000)
        with TraceWriter(run_folder, manifest=Manifest(), rank=1, seal_at=SealAt(rows=1)) as writer:
            for step in range(20):
                writer.put(Table.STEPS, [row._replace(step=step)])
                assert writer.flush()
        assert writer.failure is None
    folder = table_folder(run_folder, 1, Table.STEPS)
    left = list_table(folder)
    assert left.sealed_journals
    assert left.superseded
    with open_run(run_folder) as run:
        assert [each.step for each in run.rows(Table.STEPS, rank=1)] == list(range(20))
    TraceBuilder(run_folder, rank=1).close()
    after = list_table(folder)
    assert (after.sealed_journals, after.superseded) == ([], ())


def test_a_compaction_leaves_what_is_open_for_the_next(
    windows: None, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        trace = TraceBuilder(run_folder)
        trace.step()
        trace.close()
    with monkeypatch.context() as patch:
        played(patch, "unlink", 10_000)
        (done,) = compact([run_folder], age=0.0, waits=lambda _: None).runs
    assert done.waiting > 0
    assert done.left_alone == ()
    (done,) = compact([run_folder], age=0.0).runs
    assert (done.waiting, done.after.files) == (0, 1)
