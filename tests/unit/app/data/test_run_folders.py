"""Which runs are on offer, and under which names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ampscope.trace.location import location
from data.run_folders import RunFolder, find_offered, offered_runs, run_folders
from tests.support.paths import ROOT
from tests.support.trace_builder import TraceBuilder


@pytest.fixture(autouse=True)
def _no_folder_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AMPSCOPE_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_folder_on_the_command_line_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path / "environment"))
    assert run_folders()[0].path == tmp_path / "environment"
    monkeypatch.setattr(sys, "argv", ["/x/app/streamlit_app.py", str(tmp_path / "given")])
    assert [folder.path for folder in run_folders() if not folder.is_sample] == [tmp_path / "given"]


def test_without_either_the_default_folder_is_looked_in(tmp_path: Path) -> None:
    assert run_folders()[0].path == tmp_path / "ampscope_runs"


def test_where_it_has_no_run_those_around_are_offered(tmp_path: Path) -> None:
    TraceBuilder(tmp_path / "lightning_logs" / "version_0" / "ampscope").close()
    own = tuple(folder for folder in run_folders() if not folder.is_sample)
    assert set(find_offered(own).runs) == {"lightning_logs/version_0/ampscope"}
    TraceBuilder(tmp_path / "ampscope_runs" / "mine").close()
    assert set(find_offered(own).runs) == {"mine"}


def test_samples_around_are_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    offered = find_offered(run_folders()).runs.values()
    assert all(run.is_sample for run in offered if run.path.is_relative_to(ROOT / "sample_logs"))


def test_a_run_is_told_from_others_that_a_callback_recorded(tmp_path: Path) -> None:
    run = TraceBuilder(tmp_path / "version_3" / "ampscope").close()
    assert set(find_offered((RunFolder(run),)).runs) == {"version_3/ampscope"}


def test_runs_are_named_by_their_path_and_clashes_by_their_folder(tmp_path: Path) -> None:
    for folder in ("a/run", "a/deep/run", "b/run"):
        TraceBuilder(tmp_path / folder).close()
    folders = (RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b"))
    assert set(find_offered(folders).runs) == {"run", "deep/run", "b/run"}


def test_a_run_given_itself_is_offered_alone(tmp_path: Path) -> None:
    run = TraceBuilder(tmp_path / "mine").close()
    assert set(find_offered((RunFolder(run),)).runs) == {"mine"}


def test_a_run_that_two_folders_hold_is_offered_once(tmp_path: Path) -> None:
    TraceBuilder(tmp_path / "all" / "mine" / "run").close()
    folders = (RunFolder(tmp_path / "all"), RunFolder(tmp_path / "all" / "mine"))
    assert set(find_offered(folders).runs) == {"mine/run"}


def test_links_are_not_on_offer(tmp_path: Path) -> None:
    secret = TraceBuilder(tmp_path / "secret").close()
    inside = TraceBuilder(tmp_path / "shown" / "real").close()
    (tmp_path / "shown" / "link").symlink_to(secret)
    (tmp_path / "shown" / "alias").symlink_to(inside)
    assert {"real"} == set(find_offered((RunFolder(tmp_path / "shown"),)).runs)
    (tmp_path / "way").symlink_to(tmp_path / "shown")
    assert {"real"} == set(find_offered((RunFolder(tmp_path / "way"),)).runs), "a link that was given is followed"


def test_a_store_that_cannot_be_used_hides_no_other_folder(tmp_path: Path) -> None:
    TraceBuilder(tmp_path / "a" / "run").close()
    silent = RunFolder(location("nosuch://bucket/runs"))
    runs, unreachable, _ = find_offered((silent, RunFolder(tmp_path / "a")))
    assert set(runs) == {"run"}
    assert list(unreachable) == [silent]
    assert "no kind of store" in unreachable[silent]


def test_a_look_at_the_folders_holds_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = (RunFolder(tmp_path),)
    assert not offered_runs(folders)
    TraceBuilder(tmp_path / "run").close()
    monkeypatch.setattr("data.run_folders._TTL_S", 3600)
    assert not offered_runs(folders)
    monkeypatch.setattr("data.run_folders._TTL_S", 0)
    assert set(offered_runs(folders)) == {"run"}
