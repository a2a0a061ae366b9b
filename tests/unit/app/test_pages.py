from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.app_verdicts import CALIBRATION, OVERFLOW
from tests.support.page_reading import Shown
from tests.support.scenes import HOSTILE, SCENES
from tests.support.trace_builder import TraceBuilder
from tests.unit.app.conftest import Show

PAGES = ("overview", "incident", "replay", "usage", "scale", "precision")


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("real", [False, True], ids=["verdict by hand", "real verdict"])
def test_every_page_of_every_scene_is_drawn(show: Show, scene: str, page: str, real: bool) -> None:
    shown = show(scene, page, real=real)
    assert shown.test.title[0].value == page.capitalize()


def test_the_verdict_says_what_where_why_and_what_next(show: Show) -> None:
    words = show("overflow").words
    assert "the attention scores exceed 65,504 at step 260" in words
    assert "A value too large for float16, steps 260 to 264 (2 times)" in words
    assert "/home/me/gpt/model.py:34 in forward" in words
    assert "scores = q @ k.transpose(-2, -1)" in words
    assert "scores = (q / math.sqrt(d)) @ k.transpose(-2, -1)" in words
    assert "tried on this step: cures it" in words


def test_a_usage_mistake_has_no_mark_of_a_trial(show: Show) -> None:
    words = show("finding").words
    assert "scaler.unscale_(optimizer)" in words
    assert "tried" not in words.replace("optimizer steps tried", "")


def test_the_tiles_count_steps_skips_and_cost(show: Show) -> None:
    words = show("healthy").words
    for fact in ("400", "0.8 %", "16,384 (2^14)", "1.0 %", "NVIDIA H200", "torch 2.13.0"):
        assert fact in words


def test_a_harmless_incident_is_told_calmly(show: Show) -> None:
    words = show("healthy", "incident").words
    assert "Harmless: nothing needs to change." in words
    assert CALIBRATION.explanation in words


def test_a_link_opens_the_incident_that_it_names(show: Show) -> None:
    assert "The scale finding its place" in show("overflow", "incident", incident="0-benign_initial_calibration").words
    assert OVERFLOW.explanation in show("overflow", "incident").words


def test_the_scale_page_tells_the_story_and_the_lines(show: Show) -> None:
    words = show("healthy", "scale").words
    assert "It calibrated from 65,536 (2^16) to 8,192 (2^13) in 3 skipped steps." in words
    assert "multiplies by 2 after 200 good steps in a row, by 0.5 after a skipped step" in words
    assert "train.py:61" in words
    assert "unscale_ called 400 0 to 399 train.py:58" in " ".join(words.split())


def test_a_run_without_a_scaler_says_so(show: Show) -> None:
    assert "No step of this run used a loss scale" in show("finding", "scale").words


def test_the_precision_page_says_why_float32_was_used(show: Show) -> None:
    words = show("healthy", "precision").words
    assert "57 % in float16, 43 % in float32. Autocast was on, in float16." in words
    assert "autocast converts its operands" in words
    assert "its operands are float32 already" in words
    assert "2,097,152" in words


def test_a_run_without_traced_steps_says_how_to_trace_one(show: Show) -> None:
    assert "every=500" in show("finding", "precision").words


def test_nothing_wrong_is_a_sentence_not_an_empty_page(show: Show) -> None:
    assert "Nothing went wrong in this run" in show("empty", "incident").words
    assert "No optimizer step has been recorded yet." in show("empty").words


@pytest.mark.parametrize("page", PAGES)
def test_names_from_a_trace_are_never_markup(show: Show, page: str) -> None:
    shown = show("hostile", page)
    for body in shown.raw:
        assert "<script" not in body
        assert "<b>bold" not in body
    for element in (*shown.test.markdown, *shown.test.caption, *shown.test.subheader, *shown.test.title):
        assert HOSTILE[:20] not in element.value
    for figure in shown.figures:
        assert "<script" not in figure
        assert "<b>bold" not in figure


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
        assert "there is no" in shown.side
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
    assert "2 optimizer steps tried" in " ".join(shown.words.split())
    trace.close()


@pytest.mark.parametrize("page", ["precision", "replay"])
def test_a_step_traced_since_the_page_was_drawn_is_offered(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "live")
    site = trace.site()
    trace.step(traced="live")
    trace.op(site, step=0, source="live")
    trace.leave_open()
    shown = show("live", page)
    assert "has been traced since" not in shown.words
    trace.step(traced="live")
    trace.leave_open()  # its ops come with the next look: what is on screen must not depend on them
    shown.test.run()
    assert "Step 1 has been traced since" in shown.words


def test_two_optimizers_can_be_told_apart(show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "gan")
    for _ in range(3):
        trace.step(optimizer=0)
        trace.step(optimizer=1, scale=64.0)
    trace.close()
    assert "64 (2^6)" not in show("gan").words
    assert "64 (2^6)" in show("gan", optimizer="1").words


def test_the_simulator_answers_when_a_slider_moves(show: Show) -> None:
    shown = show("healthy", "scale")
    assert "Move a slider" in shown.words
    (initial,) = (one for one in shown.test.select_slider if one.label == "Initial scale")
    initial.set_value(8192.0).run()
    again = Shown(shown.test)
    assert "0 steps would have been skipped; 3 steps were." in " ".join(again.words.split())
    assert "init_scale=8192" in again.words
    linked = show("healthy", "scale", init_scale="8192")
    assert "0 steps would have been skipped; 3 steps were." in " ".join(linked.words.split())
    assert "Move a slider" in show("healthy", "scale", init_scale="a lot").words


def test_of_very_many_traced_steps_some_are_listed_and_any_can_be_gone_to(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "long")
    site = trace.site()
    for step in range(0, 2000, 2):
        trace.op(site, step=step, source="live")
    trace.op(site, step=100, source="replay")
    trace.close()
    shown = show("long", "precision")
    box = shown.test.selectbox(key="traced")
    assert len(box.options) < 400
    assert {"Step 1,998, recorded as it ran", "Step 0, recorded as it ran", "Step 100, replayed"} <= set(box.options)
    (number,) = shown.test.number_input
    number.set_value(999).run()
    assert shown.test.selectbox(key="traced").value in ("1000-live", "998-live")
    assert show("long", "precision", step="500").test.selectbox(key="traced").value == "500-live"
