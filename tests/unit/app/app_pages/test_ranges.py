from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from ampscope.trace.schema import Source
from tests.support.page_reading import Show, Shown
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.growing import growing


@pytest.fixture
def show_grown(show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Show:
    """Runs a page on a run in which one place grows; its exponents were counted in step 20."""
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = growing(tmp_path / "grown")
    trace.op(0, step=20, source=Source.LIVE, min=-8.0, max=8.0, exp_low=-2, exp_counts=(1, 2, 20))
    trace.close()
    return partial(show, "grown", real=True)


def test_it_begins_with_the_closest_value_and_the_share_of_steps(show_grown: Show) -> None:
    words = show_grown("ranges").words
    assert "The closest value to overflow: add in blocks.1, 7.4 bits below float16's 65,504, at step 195" in words
    assert "40 of 200 steps (20 %) were recorded op by op as they ran." in words
    assert "add in blocks.1, forward, float16" in words
    assert "Replay step 195 at this op" in words


def test_the_closest_place_is_close_up_unless_another_is_asked_for(show_grown: Show) -> None:
    shown = show_grown("ranges")
    rows = shown.tables["Closest to overflow"]  # sorted as the command's
    assert [row["Place"] for row in rows[:2]] == ["add in blocks.1", "mm in blocks.0"]
    assert "overflows near step" in "".join(shown.figures)
    assert "step=195" in shown.links["Replay step 195 at this op"]


def test_a_histogram_stands_against_each_dtype(show_grown: Show) -> None:
    shown = show_grown("ranges")
    assert "Its values at step 20, against what each dtype can hold" in shown.words
    for dtype in ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32"):
        assert f"{dtype}, normal from" in shown.words
    assert "At step 195 they were not counted" in shown.words


def test_without_counts_it_is_said(show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    growing(tmp_path / "light").close()
    assert "There is no histogram" in show("light", "ranges", real=True).words


def test_a_place_that_is_not_there_is_said_and_the_closest_is_shown(show_grown: Show) -> None:
    shown = show_grown("ranges", place="<b>no</b>")
    assert "there is no <b>no</b> here; this is the closest one" in shown.words
    assert "<b>no</b>" not in "".join(shown.raw)
    assert "add in blocks.1, forward, float16" in shown.words


def test_other_values_can_be_asked_for(show_grown: Show) -> None:
    shown = show_grown("ranges", values="backward")
    assert shown.address["values"] == "backward"
    assert "Of these, nothing was measured" not in shown.words


def test_a_run_without_traced_steps_says_how_to_trace_one(seen: Show) -> None:
    assert "every=500" in seen("finding", "ranges").words


def test_a_run_that_is_being_written_is_followed(show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "young")
    trace.step()
    trace.leave_open()
    page = show("young", "ranges", real=True)
    assert "every=500" in page.words
    site = trace.site("aten.mm.default", module="fc")
    trace.op(site, step=0, source=Source.LIVE, min=0.0, max=32.0)
    for _ in range(9):
        trace.step(traced=Source.LIVE)
    trace.leave_open()
    assert "mm in fc, 11.0 bits below float16's 65,504" in Shown(page.test.run()).words
    trace.close()


def test_a_run_in_which_nothing_broke_lands_on_its_headroom(show_grown: Show) -> None:
    shown = show_grown()
    assert "Headroom to overflow" in shown.words
    assert shown.words.index("Headroom to overflow") < shown.words.index("Time line")
    assert "All ranges, with forecasts and histograms" in shown.links


def test_a_problem_comes_before_any_headroom(seen: Show) -> None:
    assert "Headroom to overflow" not in seen("overflow").words
