"""What stands around every page: the side bar with the choice of a run, its pulse, and the welcome."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.page_reading import Show
from tests.support.trace_builder import TraceBuilder


@pytest.mark.parametrize("scene", ["no_manifest", "torn"])
def test_a_damaged_run_says_what_to_do_and_leaves_the_others_usable(show: Show, scene: str) -> None:
    shown = show(scene)
    assert "This run cannot be shown" in shown.words
    assert "cannot be read" in shown.words
    again = shown.test.selectbox(key="run").set_value("healthy").run()
    assert not again.exception
    assert again.title[0].value == "Overview"


def test_only_offered_runs_can_be_opened(show: Show, runs: Path, tmp_path: Path) -> None:
    secret = TraceBuilder(tmp_path / "secret").close()
    for asked in (str(secret), f"../{secret.name}", "no such run", "<b>x</b>"):
        shown = show(asked)
        assert shown.test.selectbox(key="run").value in shown.test.selectbox(key="run").options
        assert "there is no" in shown.words
        assert "<b>x</b>" not in "".join(shown.raw)


def test_the_address_names_the_run_on_screen(show: Show) -> None:
    shown = show("overflow")
    assert shown.test.query_params["run"] in ("overflow", ["overflow"])
    shown.test.selectbox(key="run").set_value("finding").run()
    assert shown.test.query_params["run"] in ("finding", ["finding"])


def test_an_empty_folder_says_which_line_makes_a_run(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    shown = show()
    assert "ampscope.watch(model, scaler)" in shown.words
    assert str(tmp_path) in shown.words


def test_a_run_being_written_says_so_and_shows_new_rows(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "live")
    trace.step()
    trace.leave_open()
    shown = show("live")
    assert "Being written now" in shown.side
    assert "Step 0, " in shown.side
    trace.step()
    trace.leave_open()
    shown.test.run()
    assert "2 optimizer steps" in " ".join(shown.words.split())
    trace.close()


@pytest.mark.parametrize("run", ["overflow", "no_manifest"])
def test_the_links_of_the_side_bar_name_the_run(show: Show, run: str) -> None:
    """A link opened with the middle button begins a session that remembers nothing."""
    assert set(show(run, "scale").pages.values()) == {f"run={run}"}


def test_a_page_for_several_ranks_is_offered_where_there_are_several(seen: Show) -> None:
    assert "Ranks" in seen("ranks").pages
    assert "Ranks" not in seen("overflow").pages
