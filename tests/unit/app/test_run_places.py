from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import APP
from tests.support.trace_builder import TraceBuilder


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(APP)
    monkeypatch.delenv("AMPSCOPE_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    return importlib.import_module("data.run_places")


def test_a_folder_on_the_command_line_comes_before_the_environment(
    runs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path / "environment"))
    assert runs.places()[0].path == tmp_path / "environment"
    monkeypatch.setattr(sys, "argv", ["/x/app/streamlit_app.py", str(tmp_path / "given")])
    assert [place.path for place in runs.places() if not place.is_sample] == [tmp_path / "given"]


def test_without_either_the_default_folder_is_looked_in(runs: ModuleType, tmp_path: Path) -> None:
    assert runs.places()[0].path == tmp_path / "ampscope_runs"


def test_runs_are_named_by_their_path_and_clashes_by_their_folder(runs: ModuleType, tmp_path: Path) -> None:
    for folder in ("a/run", "a/deep/run", "b/run"):
        TraceBuilder(tmp_path / folder).close()
    places = (runs.Place(tmp_path / "a"), runs.Place(tmp_path / "b"))
    assert set(runs.offers(places)) == {"run", "deep/run", "b/run"}


def test_a_run_given_itself_is_offered_alone(runs: ModuleType, tmp_path: Path) -> None:
    run = TraceBuilder(tmp_path / "mine").close()
    assert set(runs.offers((runs.Place(run),))) == {"mine"}


def test_a_run_that_two_folders_hold_is_offered_once(runs: ModuleType, tmp_path: Path) -> None:
    TraceBuilder(tmp_path / "all" / "mine" / "run").close()
    places = (runs.Place(tmp_path / "all"), runs.Place(tmp_path / "all" / "mine"))
    assert set(runs.offers(places)) == {"mine/run"}
