"""``ampscope compact``: runs named or found, text and JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ampscope.cli import storage_verbs as verb
from tests.support.command import Command
from tests.support.stores.buckets import memory_bucket, objects, put_run
from tests.support.trace_builder import TraceBuilder
from tests.unit.trace.many_parts import files_of, many_parts, what_is_read


def test_runs_below_a_folder(ampscope: Command, tmp_path: Path) -> None:
    for name in ("one", "two"):
        many_parts(tmp_path / name, ranks=1, segments=2)
    before = what_is_read(tmp_path / "one")
    answer = ampscope("compact", tmp_path, tmp_path / "one", "--at-once")
    assert (answer.code, answer.err) == (0, "")
    rows = [line.split() for line in answer.out.splitlines() if str(tmp_path) in line]
    assert sorted(row[:3] for row in rows) == [[str(tmp_path / name), "23", "11"] for name in ("one", "two")]
    assert what_is_read(tmp_path / "one") == before


def test_the_merged_files_are_removed_after_a_minute(
    ampscope: Command, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_parts(run_folder, ranks=1, segments=2)
    waited: list[float] = []
    monkeypatch.setattr(verb, "_wait", waited.append)
    answer = ampscope("compact", run_folder)
    assert waited == [60.0]
    assert answer.err == ""
    assert "23 merged files could not be removed yet; ask again later." in answer.out
    assert "could not" not in ampscope("compact", run_folder, "--at-once").out


def test_json_of_a_dry_run(ampscope: Command, run_folder: Path) -> None:
    many_parts(run_folder, ranks=1, segments=2)
    before = files_of(run_folder)
    told = json.loads(ampscope("compact", run_folder, "--dry-run", "--json").out)
    assert files_of(run_folder) == before
    assert told["dry_run"] is True
    assert told["runs"][0]["before"]["files"] == 23
    assert told["runs"][0]["after"] == {"files": 11, "bytes": None}
    assert "Nothing was changed." in ampscope("compact", run_folder, "--dry-run").out


def test_a_run_that_is_being_written_is_no_failure(ampscope: Command, run_folder: Path) -> None:
    many_parts(run_folder, ranks=1, segments=2)
    trace = TraceBuilder(run_folder)
    answer = ampscope("compact", run_folder, "--at-once")
    trace.close()
    assert answer.code == 0
    assert "rank=0: It is being written by a process; left alone." in " ".join(answer.out.split())


def test_what_cannot_be_read_is_one(ampscope: Command, run_folder: Path) -> None:
    many_parts(run_folder, ranks=1, segments=2)
    damaged = next((run_folder / "rank=0" / "steps").glob("part-*"))
    damaged.write_bytes(b"")
    answer = ampscope("compact", run_folder, "--at-once")
    assert answer.code == 2
    assert damaged.name in answer.out


def test_no_run(ampscope: Command, tmp_path: Path) -> None:
    answer = ampscope("compact", tmp_path)
    assert (answer.code, answer.out) == (2, "")
    assert "There is no run in" in answer.err
    assert "There is no folder" in ampscope("compact", tmp_path / "gone").err


def test_the_wait_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    verb._wait(0.0)
    assert "waiting 0 s before the merged files are removed" in capsys.readouterr().err


def test_a_run_in_a_store_stays_as_it_is_and_is_told(ampscope: Command, tmp_path: Path) -> None:
    many_parts(tmp_path / "one", ranks=1, segments=2)
    with memory_bucket() as url:
        put_run(tmp_path / "one", f"{url}/one")
        before = objects(url)
        answer = ampscope("compact", f"{url}/one", "--at-once")
        assert objects(url) == before
    assert answer.code == 2
    assert "It lies in an object store, where nothing is merged: compact it on a disk." in answer.out
