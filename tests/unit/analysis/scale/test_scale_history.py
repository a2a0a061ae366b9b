from __future__ import annotations

from pathlib import Path

import pytest

from ampscope import open_run
from ampscope.analysis.scale.scale_history import ScaleHistory, scale_history, scale_story
from ampscope.analysis.words import in_words
from ampscope.trace.schema import ScalerAction
from tests.support.trace_builder import TraceBuilder

UP, DOWN = ScalerAction.GROWTH, ScalerAction.BACKOFF


def history_of(folder: Path, scales: list[float], *, events: bool = True) -> ScaleHistory:
    """A run whose steps used ``scales`` in turn, every change told by an event unless ``events`` is off."""
    trace = TraceBuilder(folder)
    for step, scale in enumerate(scales):
        following = scales[step + 1] if step + 1 < len(scales) else scale
        trace.step(scale=scale, skipped=following < scale)
        if events and following != scale:
            action = UP if following > scale else DOWN
            trace.scaler_event(action, step=step, scale_before=scale, scale_after=following)
    return scale_history(open_run(trace.close()))


def test_an_empty_run_and_one_without_a_scaler_have_no_story(tmp_path: Path) -> None:
    assert scale_history(open_run(TraceBuilder(tmp_path / "empty").close())) == ScaleHistory()
    trace = TraceBuilder(tmp_path / "bf16")
    trace.step(scale=None, growth_tracker=None)
    history = scale_history(open_run(trace.close()))
    assert not history.is_scaled
    assert scale_story(history) == ()


@pytest.mark.parametrize("events", [True, False], ids=["from events", "from steps"])
def test_calibration_then_growth_is_told_calmly(run_folder: Path, events: bool) -> None:
    scales = [65536.0, 32768.0, 16384.0, *[8192.0] * 40, *[16384.0] * 40, *[32768.0] * 5]
    assert scale_story(history_of(run_folder, scales, events=events)) == (
        "It calibrated from 65,536 (2¹⁶) to 8,192 (2¹³) in 3 skipped steps.",
        "Then it grew twice, to 32,768 (2¹⁵).",
        "It is now 32,768 (2¹⁵).",
    )


def test_probing_growth_is_one_sentence(run_folder: Path) -> None:
    scales = [*[1024.0] * 30, *[2048.0, 1024.0] * 4, 1024.0]
    story = scale_story(history_of(run_folder, scales))
    assert story[1] == "Then it grew 4 times and backed off 4 times, between 1,024 (2¹⁰) and 2,048 (2¹¹)."


def test_a_fall_after_calibration_says_when(run_folder: Path) -> None:
    scales = [*[4096.0] * 100, *[4096.0 / 2**i for i in range(1, 11)]]
    story = scale_story(history_of(run_folder, scales))
    assert story[1] == "Between steps 99 and 108 it fell from 4,096 (2¹²) to 4 (2²) in 10 skipped steps."


def test_a_fall_long_after_calibration_is_another_story(run_folder: Path) -> None:
    scales = [2.0**16, *[2.0**15] * 290, 2.0**14, 2.0**13, 2.0**12, 2.0**11]
    assert scale_story(history_of(run_folder, scales)) == (
        "It calibrated from 65,536 (2¹⁶) to 32,768 (2¹⁵) in one skipped step.",
        "Between steps 290 and 293 it fell from 32,768 (2¹⁵) to 2,048 (2¹¹) in 4 skipped steps.",
        "It is now 2,048 (2¹¹).",
    )


def test_a_collapse_from_the_start_is_not_calibration(run_folder: Path) -> None:
    story = scale_story(history_of(run_folder, [65536.0 / 2**i for i in range(40)]))
    assert "calibrated" not in " ".join(story)
    assert "fell from 65,536 (2¹⁶)" in story[1]


def test_a_loaded_checkpoint_is_named(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(30):
        trace.step(scale=1024.0 if step < 20 else 64.0)
    trace.scaler_event(ScalerAction.STATE_LOADED, step=19, scale_before=1024.0, scale_after=64.0)
    story = scale_story(scale_history(open_run(trace.close())))
    assert "At step 19 it was set to 64 (2⁶) from a checkpoint." in story


def test_routine_calls_are_told_once_for_each_line(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(5):
        trace.step()
        trace.scaler_event(ScalerAction.UNSCALE, step=step, optimizer=0, line=44)
    trace.scaler_event(ScalerAction.SETTER, step=3, detail='{"growth_interval": 500}')
    trace.scaler_event(ScalerAction.INIT, detail='{"init_scale": 65536.0, "growth_interval": 2000, "enabled": true}')
    history = scale_history(open_run(trace.close()))
    (call,) = history.calls
    assert (call.action, call.count, call.first_step, call.last_step) == ("unscale", 5, 0, 4)
    assert call.source is not None
    assert call.source.line == 44
    assert [event.detail for event in history.events if event.action == "setter"] == ["growth_interval = 500"]
    assert (history.settings.init_scale, history.settings.growth_interval) == (65536.0, 2000.0)
    assert history.settings.growth_factor is None


def test_an_event_after_the_newest_step_tells_the_current_scale(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step(scale=8.0)
    trace.scaler_event(DOWN, step=0, scale_before=8.0, scale_after=4.0)
    history = scale_history(open_run(trace.close()))
    assert (history.current, history.lowest) == (4.0, 4.0)


def test_events_of_another_optimizers_scaler_are_left_out(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step(optimizer=0)
    trace.step(optimizer=1, scale=32.0)
    trace.scaler_event(ScalerAction.UNSCALE, scaler=0, optimizer=0)
    trace.scaler_event(ScalerAction.UNSCALE, scaler=1, optimizer=1)
    trace.scaler_event(DOWN, scaler=1, scale_before=32.0, scale_after=16.0)
    run = open_run(trace.close())
    assert scale_history(run).moves == ()
    assert scale_history(run, optimizer=1).current == 16.0
    assert scale_history(run).scalers == 2


def test_details_that_are_not_json_are_no_arguments(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    trace.scaler_event(ScalerAction.INIT, detail="{broken")
    history = scale_history(open_run(trace.close()))
    assert history.events[0].detail == ""
    assert history.settings.init_scale is None


@pytest.mark.parametrize(
    ("scale", "words"),
    [(65536.0, "65,536 (2¹⁶)"), (0.5, "0.5 (2⁻¹)"), (3000.0, "3,000"), (0.0, "0"), (2.0**-149, "1.401e-45 (2⁻¹⁴⁹)")],
)
def test_scales_in_words(scale: float, words: str) -> None:
    assert in_words(scale) == words
