"""A run in an object store reads as the same run on a disk does, and of the store only that run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import duckdb
import fsspec
import pytest

from ampscope.errors import RunNotFound
from ampscope.trace import object_store
from ampscope.trace.files.folder_lock import LOCK_FILE
from ampscope.trace.read.find import find_runs
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Table
from tests.support.command import Command
from tests.support.paths import ROOT
from tests.support.stores.buckets import memory_bucket, put_run
from tests.support.trace_builder import TraceBuilder

SAMPLES = ROOT / "sample_logs"


@pytest.fixture
def bucket() -> Iterator[str]:
    with memory_bucket() as url:
        yield url


@pytest.mark.parametrize("name", ["attention-overflow", "healthy"])
def test_the_diagnosis_is_the_same(bucket: str, name: str, ampscope: Command) -> None:
    url = put_run(SAMPLES / name, f"{bucket}/{name}")
    there, here = (json.loads(ampscope("diagnose", run, "--json").out) for run in (url, SAMPLES / name))
    assert there["run"].pop("path") == url
    here["run"].pop("path")
    assert there == here


def test_every_table_has_the_same_rows(bucket: str) -> None:
    folder = SAMPLES / "attention-overflow"
    with open_run(put_run(folder, f"{bucket}/run")) as there, open_run(folder) as here:
        assert there.status == here.status
        assert there.ranks == here.ranks
        assert there.manifest == here.manifest
        for table in Table:
            assert repr(there.rows(table)) == repr(here.rows(table))  # a NaN equals none
        query = "SELECT source, count(*), max(max) FROM ops GROUP BY source ORDER BY source"
        assert repr(there.sql(query).fetchall()) == repr(here.sql(query).fetchall())


def test_a_query_reaches_that_run_and_nothing_beside_it(bucket: str) -> None:
    put_run(SAMPLES / "healthy", f"{bucket}/other")
    part = next(path for path in (SAMPLES / "healthy" / "rank=0" / "steps").iterdir()).name
    with open_run(put_run(SAMPLES / "healthy", f"{bucket}/run")) as run:
        run.sql(f"SELECT * FROM read_parquet('{bucket}/run/rank=0/steps/{part}')").fetchall()
        for outside in (f"{bucket}/other", f"{bucket}/run/../other"):
            with pytest.raises((duckdb.Error, PermissionError)):
                run.sql(f"SELECT * FROM read_parquet('{outside}/rank=0/steps/{part}')").fetchall()


def test_runs_are_found_two_levels_deep_newest_first(bucket: str, tmp_path: Path, ampscope: Command) -> None:
    for name, created in (("old", 1.0), ("new", 2.0)):
        with TraceBuilder(tmp_path / name, created=created).writer:
            pass
    put_run(tmp_path / "old", f"{bucket}/deeper/old")
    put_run(tmp_path / "new", f"{bucket}/new")
    assert [str(run) for run in find_runs(bucket)] == [f"{bucket}/new", f"{bucket}/deeper/old"]
    assert [str(run) for run in find_runs(f"{bucket}/new")] == [f"{bucket}/new"]
    with open_run(f"{bucket}/deeper") as run:
        assert str(run.path) == f"{bucket}/deeper/old"
    with pytest.raises(RunNotFound, match="There are 2 runs"):
        open_run(bucket)
    with pytest.raises(RunNotFound, match="does not exist"):
        open_run(f"{bucket}/nothing")
    listed = ampscope("runs", bucket, "--quick").out
    assert "old" in listed
    assert "new" in listed


def test_a_run_that_is_written_is_followed(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "HOLDS_S", 0.0)
    files, builder = fsspec.filesystem("memory"), TraceBuilder(tmp_path / "run")
    builder.step()
    url = put_run(builder.leave_open(), f"{bucket}/run")
    with open_run(url) as run:
        assert [row.step for row in run.rows(Table.STEPS)] == [0]
        assert [run.status] == ["interrupted"]
        builder.step()
        put_run(builder.leave_open(), url)
        files.pipe_file(f"{url}/rank=0/{LOCK_FILE}", b"")  # the mark of who writes
        assert [row.step for row in run.rows(Table.STEPS)] == [0, 1]
        assert [run.status] == ["open"]
        put_run(builder.close(), url)
        files.rm_file(f"{url}/rank=0/steps/journal-000000.arrow")
        assert [row.step for row in run.rows(Table.STEPS)] == [0, 1]
        assert [run.status] == ["closed"]


def test_two_runs_are_compared(bucket: str, ampscope: Command) -> None:
    url = put_run(SAMPLES / "healthy", f"{bucket}/run")
    told = ampscope("compare", url, SAMPLES / "healthy")
    assert told.code == 0, told.err
    with open_run(url) as run:
        step = next(row.step for row in run.rows(Table.STEPS) if row.traced)
    told = ampscope("compare", f"{url}@{step}", f"{url}@{step}", "--json")
    assert told.code == 0, told.err
    assert json.loads(told.out)["a"]["path"] == url


@pytest.mark.parametrize("verb", ["ranges", "scale", "plan"])
def test_verbs_take_a_url(bucket: str, ampscope: Command, verb: str) -> None:
    url = put_run(SAMPLES / "attention-overflow", f"{bucket}/run")
    there, here = ampscope(verb, url, "--json"), ampscope(verb, SAMPLES / "attention-overflow", "--json")
    assert (there.code, there.out.replace(url, "")) == (
        here.code,
        here.out.replace(str(SAMPLES / "attention-overflow"), ""),
    )
    assert json.loads(there.out)


def test_a_report_is_written_of_a_run_in_a_bucket(bucket: str, ampscope: Command, tmp_path: Path) -> None:
    url = put_run(SAMPLES / "attention-overflow", f"{bucket}/run")
    told = ampscope("report", url, "-o", tmp_path / "report.html")
    assert told.code in (0, 1), told.err
    assert url in (tmp_path / "report.html").read_text("utf-8")


def test_what_is_not_there_is_told_in_a_line(bucket: str, ampscope: Command) -> None:
    told = ampscope("diagnose", f"{bucket}/nothing")
    assert told.code == 2
    assert f"{bucket}/nothing does not exist" in told.err
    told = ampscope("diagnose", "nowhere://bucket/run")
    assert told.code == 2
    assert "no kind of store" in told.err
