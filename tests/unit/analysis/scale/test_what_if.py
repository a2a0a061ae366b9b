from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ampscope import open_run
from ampscope.analysis.scale.answer import scale_answer
from ampscope.analysis.scale.scale_history import skipped_steps
from ampscope.analysis.scale.scaler_course import ScaleCourse
from ampscope.analysis.scale.what_if import ScalerRules, WhatIf, bearable, scale_record, what_if
from tests.support.trace_builder import TraceBuilder

RULES = ScalerRules(init_scale=64.0, growth_interval=4)


def simulate(folder: Path, limits: list[float], rules: ScalerRules = RULES) -> ScaleCourse:
    """A run of a scaler with ``rules`` whose steps bear the scales in ``limits``; one that bears none has no loss."""
    trace = TraceBuilder(folder)
    scale, good = rules.init_scale, 0
    for bears in limits:
        bad = scale > bears
        trace.step(scale=scale, skipped=bad, loss=math.nan if bears < 0 else 1.0)
        good = 0 if bad else good + 1
        if bad:
            scale = float(np.float32(scale * rules.backoff_factor))  # as a GradScaler keeps it
        elif good == rules.growth_interval:
            scale, good = float(np.float32(scale * rules.growth_factor)), 0
    with open_run(trace.close()) as run:
        return scale_record(run)


def test_the_rules_of_the_run_itself_give_its_own_history(tmp_path: Path) -> None:
    record = simulate(tmp_path, [16.0] * 30 + [-1.0] + [16.0] * 10)
    answer = what_if(record, RULES)
    assert answer.skipped == answer.was_skipped == int(record.skipped.sum()) > 3
    assert 2.0 ** answer.log2_scale.values[-1] == record.scale[-1]
    assert answer.proven == answer.steps
    assert answer.unsaved == 1


@pytest.mark.parametrize(
    "limits", [[1e9] * 40, [16.0] * 40, [3.0, 900.0, 900.0, 20.0] * 10], ids=["healthy", "probing", "skipping"]
)
def test_factors_that_are_no_powers_of_two_are_rounded_as_the_scaler_does(tmp_path: Path, limits: list[float]) -> None:
    rules = ScalerRules(init_scale=1000.1, growth_factor=1.3, backoff_factor=0.1, growth_interval=3)
    record = simulate(tmp_path, limits, replace(rules, init_scale=float(np.float32(1000.1))))
    answer = what_if(record, rules)
    assert answer.log2_scale.values == tuple(np.log2(record.scale).tolist())
    assert answer.skips == tuple(record.step[record.skipped].tolist())
    assert answer.proven == answer.steps


def test_a_scale_does_not_grow_to_infinity(tmp_path: Path) -> None:
    record = simulate(tmp_path, [math.inf] * 12)
    answer = what_if(record, ScalerRules(init_scale=2.0**127, growth_interval=1))
    assert (answer.lowest, answer.current, answer.skipped) == (2.0**127, 2.0**127, 0)


def test_a_lower_start_saves_the_calibration_and_a_longer_interval_the_probing(tmp_path: Path) -> None:
    record = simulate(tmp_path, [16.0] * 40)
    assert record.skipped[:2].all()
    lower = what_if(record, replace(RULES, init_scale=16.0))
    assert (what_if(record, RULES).skips[:2], lower.skips[:1]) == ((0, 1), (4,))
    still = what_if(record, replace(RULES, init_scale=16.0, growth_interval=1000))
    assert (still.skipped, still.lowest, still.current) == (0, 16.0, 16.0)
    assert still.proven < still.steps  # that 16 was borne at every step is an estimate


def test_a_floor_holds_although_steps_are_lost_on_it(tmp_path: Path) -> None:
    record = simulate(tmp_path, [1.0] * 20)
    answer = what_if(record, replace(RULES, floor=32.0))
    assert (answer.lowest, answer.skipped) == (32.0, 20)


def test_no_scale_saves_a_step_without_a_finite_loss(tmp_path: Path) -> None:
    record = simulate(tmp_path, [64.0, -1.0, 64.0])
    assert what_if(record, replace(RULES, init_scale=2.0**-8)).skips == (1,)


def test_a_step_that_was_made_without_a_finite_loss_was_not_skipped(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    for step in range(8):
        trace.step(scale=64.0, skipped=False, loss=math.nan if step == 3 else 1.0)
    with open_run(trace.close()) as run:
        record = scale_record(run)
        assert "no scale would have saved" not in scale_answer(run).sentence
    answer = what_if(record, ScalerRules(init_scale=64.0))
    assert (answer.skipped, answer.unsaved, answer.proven) == (0, 0, 8)


def test_what_was_never_skipped_is_taken_to_bear_any_scale(tmp_path: Path) -> None:
    record = simulate(tmp_path, [1e9] * 3)
    assert bearable(record).tolist() == [math.inf] * 3
    assert what_if(record, replace(RULES, init_scale=2.0**30)).proven == 0


def test_a_run_without_a_scaler_has_no_answer(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    trace.step(scale=None)
    with open_run(trace.close()) as run:
        assert what_if(scale_record(run), RULES) == WhatIf(rules=RULES)


@pytest.mark.parametrize("recorded", ["gradients", "incident", "nothing"])
def test_a_skip_names_the_parameters_that_tripped_it(tmp_path: Path, recorded: str) -> None:
    trace = TraceBuilder(tmp_path)
    names = [f"layer{number}.weight" for number in range(5)]
    for name in names:
        trace.param(name)
    for step in range(3):
        trace.step(skipped=step == 1, scale=128.0)
        for param in range(5):
            if recorded == "gradients":
                trace.grad(step=step, param=param, nonfinite=step == 1 and param > 0)
    if recorded == "incident":
        trace.incident(step=1, bad_params=("layer1.weight",))
    with open_run(trace.close()) as run:
        (one,) = skipped_steps(run)
    assert (one.step, one.scale, one.all_params) == (1, 128.0, 5)
    expected = {"gradients": (tuple(names[1:4]), 4), "incident": (("layer1.weight",), 1), "nothing": ((), 0)}
    assert (one.params, one.tripped) == expected[recorded]
