from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.page_reading import Show
from tests.support.trace_builder import TraceBuilder


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


def test_the_report_is_offered(show: Show) -> None:
    buttons = show("healthy").test.get("download_button")
    assert [button.proto.label for button in buttons] == ["Report to send on"]


def test_two_optimizers_can_be_told_apart(show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "gan")
    for _ in range(3):
        trace.step(optimizer=0)
        trace.step(optimizer=1, scale=64.0)
    trace.close()
    assert "64 (2^6)" not in show("gan").words
    assert "64 (2^6)" in show("gan", optimizer="1").words


def test_a_run_without_steps_says_so(show: Show) -> None:
    assert "No optimizer step has been recorded yet." in show("empty").words


def test_a_scale_that_collapsed_is_told_on_its_tile_and_once_in_words(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", str(tmp_path))
    trace = TraceBuilder(tmp_path / "fallen")
    for step in range(80):
        bad = step >= 40
        trace.step(scale=2.0 ** (16 - max(0, step - 40)), skipped=bad, found_inf=bad, growth_tracker=0)
    trace.close()
    shown = show("fallen", real=True)
    assert "The loss scale: collapsed at 1.19e-07 (2^-23)" in shown.words
    assert "40 of 80 steps (50 %)" in shown.words
    assert "loss scale now: collapsed" in shown.words
    assert any('class="amp-tile error"' in one for one in shown.raw)
    assert shown.words.count("so a smaller scale is no cure") == 1
    calm = show("healthy")
    assert "loss scale now:" not in calm.words
    assert "The loss scale: " not in calm.words
