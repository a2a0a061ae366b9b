"""The page with the list of runs, and what is kept behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
import streamlit as st

from ampscope.trace.schema import EventKind
from ampscope.trace.vocabulary import SWITCHED_OFF
from tests.support.page_reading import Show, Shown
from tests.support.trace_builder import TraceBuilder


def rows_of(shown: Shown) -> list[dict[str, str]]:
    """The rows of the table, as the page has them now."""
    return Shown(shown.test).tables.get("Runs", [])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    return tmp_path


def test_each_run_has_a_row_and_soon_its_verdict(show: Show, folder: Path) -> None:
    good = TraceBuilder(folder / "good", tags=("nightly",), created=1.7e9 + 1)
    good.step()
    good.close()
    bad = TraceBuilder(folder / "bad")
    bad.step()
    bad.finding()
    bad.close()
    TraceBuilder(folder / "unseen").close()
    part = TraceBuilder(folder / "part")
    part.step()
    part.event(EventKind.WARNING, f"the op tracer {SWITCHED_OFF} after ValueError: no (tracer.py:3)")
    part.close()
    (TraceBuilder(folder / "broken").close() / "run.json").write_text("{")
    shown = show("good", "runs", real=True)
    rows = {row["Run"]: row for row in rows_of(shown)}
    assert rows["good"]["Steps"] == "1"
    assert rows["good"]["State"] == "finished"
    assert rows["good"]["Tags"] == "nightly"
    assert rows["broken"]["Verdict"] == "unreadable"
    assert "run.json cannot be read" in rows["broken"]["What"]
    for _ in range(8):  # each time it is drawn, as many are diagnosed as a part of a second allows
        shown.test.run()
    rows = {row["Run"]: row for row in rows_of(shown)}
    assert rows["good"]["Verdict"] == "healthy"
    assert rows["unseen"]["Verdict"] == "not observed"
    assert rows["unseen"]["What"].startswith("Nothing was observed")
    assert rows["part"]["Verdict"] == "partly observed"
    assert "the op tracer switched itself off" in rows["part"]["What"]
    assert (rows["bad"]["Verdict"], rows["bad"]["What"]) == ("problem", "gradients clipped before they were unscaled")


def test_before_its_diagnosis_a_run_tells_what_was_recorded(show: Show, folder: Path) -> None:
    trace = TraceBuilder(folder / "new")
    trace.step()
    trace.incident()
    trace.close()
    shown = show("new", "runs", real=True)
    row = next(row for row in rows_of(shown) if row["Run"] == "new")
    assert (row["Verdict"], row["What"]) == ("not examined", "1 incident recorded")


def test_a_search_leaves_what_has_all_its_words(show: Show, folder: Path) -> None:
    for name, model in (("one", "GPT"), ("two", "ResNet")):
        TraceBuilder(folder / name, model=model).close()
    shown = show("one", "runs")
    shown.test.text_input[0].set_value("resnet two").run()
    assert [row["Run"] for row in rows_of(shown)] == ["two"]
    shown.test.text_input[0].set_value("no such run").run()
    assert "None of the" in Shown(shown.test).words


def test_a_run_that_cannot_be_read_does_not_take_the_list_away(show: Show, folder: Path) -> None:
    (TraceBuilder(folder / "broken").close() / "run.json").write_text("{")
    shown = show("broken", "runs")
    assert "This run cannot be shown" in shown.words
    assert "broken" in [row["Run"] for row in rows_of(shown)]


def test_a_run_being_written_is_judged_anew_when_something_goes_wrong(show: Show, folder: Path) -> None:
    trace = TraceBuilder(folder / "live")
    trace.step()
    trace.leave_open()
    shown = show("live", "runs", real=True)
    for _ in range(2):
        shown.test.run()
    assert next(row for row in rows_of(shown) if row["Run"] == "live")["Verdict"] == "healthy"
    trace.finding()
    trace.leave_open()
    for _ in range(2):
        shown.test.run()
    assert next(row for row in rows_of(shown) if row["Run"] == "live")["Verdict"] == "problem"
    trace.close()


def test_a_search_finds_words_of_the_verdict_and_can_be_emptied(show: Show, folder: Path) -> None:
    trace = TraceBuilder(folder / "bad")
    trace.step()
    trace.finding()
    trace.close()
    TraceBuilder(folder / "good").close()
    shown = show("bad", "runs", real=True)
    shown.test.run()
    shown.test.text_input[0].set_value("clipped").run()
    found = {str(row["Run"]) for row in rows_of(shown)}
    assert "bad" in found
    assert "good" not in found
    shown.test.text_input[0].set_value("").run()
    assert {"bad", "good"} <= {str(row["Run"]) for row in rows_of(shown)}


def test_a_run_begun_since_is_found_without_a_reload(show: Show, folder: Path) -> None:
    TraceBuilder(folder / "first").close()
    shown = show("first", "runs")
    TraceBuilder(folder / "second").close()
    st.cache_resource.clear()  # a look at the folders holds for some seconds
    shown.test.run()
    assert "second" in [row["Run"] for row in rows_of(shown)]
