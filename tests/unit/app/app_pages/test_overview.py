from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ampscope.analysis.overview.overview import Overview
from ampscope.report.html.cards import run_tiles
from ampscope.trace.schema import ScalerAction
from tests.support.page_reading import Show
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.by_hand import HEALTHY
from tests.support.verdicts.of_scenes import OVERFLOW


def test_the_verdict_says_what_where_why_and_what_next(seen: Show) -> None:
    words = seen("overflow").words
    assert "Step 260 had a non-finite loss." in words
    assert words.count(OVERFLOW.explanation) == 1
    assert "A value too large for float16, steps 260 to 264 (2 times)" in words
    assert "/home/me/gpt/model.py:34 in forward" in words
    assert "scores = q @ k.transpose(-2, -1)" in words
    assert "scores = (q / math.sqrt(d)) @ k.transpose(-2, -1)" in words
    assert "tried on this step: cures it" in words


def test_a_usage_mistake_has_no_mark_of_a_trial(seen: Show) -> None:
    words = seen("finding").words
    assert "scaler.unscale_(optimizer)" in words
    assert "tried" not in words


def test_the_tiles_count_steps_skips_and_cost(seen: Show) -> None:
    words = seen("healthy").words
    for fact in ("400", "0.8 %", "16,384 (2¹⁴)", "1.0 %", "NVIDIA H200", "torch 2.13.0"):
        assert fact in words


def test_a_healthy_run_says_what_its_scale_did_and_what_was_checked(seen: Show) -> None:
    words = " ".join(seen("healthy").words.split())
    assert "The loss scale It calibrated from 65,536" in words
    assert re.search(r"What was checked All \d+ checks of the loop found no mistake\.", words)
    assert "What was checked" not in seen("overflow").words


def test_observing_the_first_steps_is_told_apart_from_the_rest() -> None:
    seen = Overview(steps=100, settled_share=0.009, observing_share=0.58, step_seconds=0.05)
    told = {what: value for what, value, *_ in run_tiles(seen, HEALTHY)}
    assert told["of the time spent on observing, newest half of the steps"] == "0.9 %"
    assert told["of the time spent on observing, all steps"] == "58 %"
    same = run_tiles(replace(seen, observing_share=0.009), HEALTHY)
    assert [what for what, *_ in same if "observing" in what] == ["of the time spent on observing"]


def test_the_report_is_offered(seen: Show) -> None:
    buttons = seen("healthy").test.get("download_button")
    assert [button.proto.label for button in buttons] == ["Report to send on"]


def test_two_optimizers_can_be_told_apart(show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "gan")
    for _ in range(3):
        trace.step(optimizer=0)
        trace.step(optimizer=1, scale=64.0)
    trace.close()
    assert "64 (2⁶)" not in show("gan").words
    assert "64 (2⁶)" in show("gan", optimizer="1").words


def test_a_run_without_steps_says_so(seen: Show) -> None:
    assert "No optimizer step has been recorded yet." in seen("empty").words


def test_a_scale_that_collapsed_is_told_on_its_tile_and_once_in_words(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "fallen")
    for step in range(80):
        bad = step >= 40
        trace.step(scale=2.0 ** (16 - max(0, step - 40)), skipped=bad, found_inf=bad, growth_tracker=0)
    trace.scaler_event(ScalerAction.BACKOFF, step=79, scale_before=2.0**-23, scale_after=2.0**-24)
    trace.close()
    shown = show("fallen", real=True)
    assert "The loss scale: collapsed, 1.192e-7 (2⁻²³) in the newest step" in shown.words
    assert "40 of 80 steps (50 %)" in shown.words
    next_one = "<b>5.96e-8 (2⁻²⁴)</b><span>loss scale of the next step</span>"
    assert any(f'<div class="amp-tile error">{next_one}' in one for one in shown.raw)
    assert shown.words.count("so a smaller scale is no cure") == 1
    for page in ("scale", "wall"):
        assert any(f'<div class="amp-tile error">{next_one}' in one for one in show("fallen", page, real=True).raw)
    calm = show("healthy")
    assert "The loss scale: " not in calm.words
