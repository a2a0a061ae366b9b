"""Whether a loss scale is right, in one sentence, and what to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ampscope import diagnose, open_run
from ampscope.analysis.scale.answer import Judgement, ScaleAnswer, scale_answer
from ampscope.analysis.scale.window import MOSTLY
from ampscope.trace.schema import ScalerAction
from ampscope.trace.vocabulary import Verdict
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.counted import SMALL, with_gradient


def answer_of(trace: TraceBuilder) -> ScaleAnswer:
    with open_run(trace.close()) as run:
        return scale_answer(run)


def test_a_scale_that_keeps_the_gradients_is_right(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    for _ in range(30):
        trace.step(scale=2.0**17)
    with_gradient(trace, SMALL * 2.0**17, scale=2.0**17)
    answer = answer_of(trace)
    assert answer.judgement == Judgement.RIGHT
    assert answer.sentence == (
        "Yes: at 131,072 (2¹⁷), none of the gradient values that were measured are flushed to zero, and up to "
        "3.436e10 (2³⁵) nothing that was measured overflows."
    )
    assert answer.recommendation is not None
    assert answer.recommendation.text == "Leave the scaler as it is."


def test_one_at_which_gradients_are_flushed_is_too_small(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    for _ in range(30):
        trace.step(scale=16.0)
    flushed = (SMALL * 16).astype(np.float16).astype(np.float64)
    for _ in range(3):
        with_gradient(trace, flushed, scale=16.0)
    answer = answer_of(trace)
    assert answer.judgement == Judgement.TOO_SMALL
    assert answer.sentence.startswith("No, it is too small: at 16 (2⁴), 100.0 % of the gradient values")
    assert answer.recommendation is not None
    assert answer.recommendation.rules is not None
    start = answer.recommendation.rules.init_scale
    assert ((SMALL * start).astype(np.float16) > 0).all()
    assert (SMALL * start < 65520).all()


def test_where_no_scale_keeps_all_a_larger_one_is_not_recommended_alone(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    for _ in range(30):
        trace.step(scale=16.0)
    for _ in range(3):
        with_gradient(trace, (SMALL * 16).astype(np.float16).astype(np.float64), scale=16.0)
        with_gradient(trace, np.full(8, 60000.0), scale=16.0, name="head.bias")
    sentence = answer_of(trace).sentence
    assert "on they are kept, but above 16 (2⁴) " in sentence
    assert sentence.endswith(" overflows.")


def test_one_look_at_flushed_gradients_says_that_a_larger_scale_would_keep_more(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    for _ in range(30):
        trace.step(scale=16.0)
    with_gradient(trace, (SMALL * 16).astype(np.float16).astype(np.float64), scale=16.0)
    answer = answer_of(trace)
    assert answer.judgement == Judgement.LOW
    assert answer.sentence.startswith("It serves, and a larger one would keep more: at 16 (2⁴), 100.0 % of")


def test_a_scale_at_which_a_fifth_is_subnormal_serves_as_diagnose_says(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    for _ in range(30):
        trace.step(scale=2.0**13)
    for _ in range(3):
        with_gradient(trace, SMALL * 2.0**13, scale=2.0**13)
    folder = trace.close()
    with open_run(folder) as run:
        answer = scale_answer(run)
        healthy = diagnose(run).verdict
    now = next(each for each in answer.window.at_scale if each.scale == 2.0**13)
    assert 0.1 < now.lost_share + now.subnormal_share < MOSTLY
    assert (healthy, answer.judgement) == (Verdict.HEALTHY, Judgement.LOW)
    assert not answer.sentence.startswith("No")
    assert answer.recommendation is not None
    assert answer.recommendation.text.startswith("Start at")


def test_a_tail_of_subnormals_is_no_loss(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    scale = 2.0**17
    for _ in range(30):
        trace.step(scale=scale)
    tail = SMALL[::20] * 2.0**-13  # below float16's normal numbers at this scale, and hardly flushed
    with_gradient(trace, np.concatenate([SMALL, tail]) * scale, scale=scale)
    answer = answer_of(trace)
    now = next(each for each in answer.window.at_scale if each.scale == scale)
    assert 0.01 < now.lost_share + now.subnormal_share < 0.1
    assert answer.judgement == Judgement.RIGHT


def test_without_counted_gradients_only_the_skips_speak(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    for _ in range(30):
        trace.step(scale=1024.0)
    answer = answer_of(trace)
    assert answer.judgement == Judgement.RIGHT
    assert answer.sentence.startswith("As far as skipped steps tell, 1,024 (2¹⁰) is right; how much")


def test_a_collapse_is_told_with_its_cure(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    for step in range(40):
        trace.step(scale=2.0 ** (16 - step), skipped=True)
    trace.scaler_event(ScalerAction.BACKOFF, step=39, scale_before=2.0**-23, scale_after=2.0**-24)
    answer = answer_of(trace)
    assert answer.judgement == Judgement.UNWELL
    assert answer.sentence == (
        "It has fallen to 5.96e-8 (2⁻²⁴) and steps are skipped all the same: no scale helps, for something else is "
        "wrong."
    )
    assert answer.recommendation is not None
    assert answer.recommendation.reason == answer.health.explanation  # type: ignore[union-attr]  # it has a scale


def test_a_long_calibration_is_worth_another_start(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    scale = 2.0**16
    for step in range(60):
        trace.step(scale=scale, skipped=step < 6)
        scale /= 2 if step < 6 else 1
    answer = answer_of(trace)
    assert answer.recommendation is not None
    assert answer.recommendation.rules is not None
    assert answer.recommendation.rules.init_scale == 1024.0
    assert answer.recommendation.reason == "No step was skipped instead of 6, by the run's own record."


def test_no_scaler_no_verdict(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    trace.step(scale=None)
    answer = answer_of(trace)
    assert (answer.judgement, answer.recommendation) == (Judgement.UNSCALED, None)
    assert answer.sentence == "No step of this run used a loss scale."
