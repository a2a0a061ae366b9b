"""What is said of an incident, and not said where the evidence for it is missing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ampscope import diagnose
from ampscope.analysis.results import Incident
from ampscope.analysis.words import steps_in_words
from ampscope.trace.schema import EventKind, Node, Phase, ReplayStatus, Trigger
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.support.trace_builder import TraceBuilder
from tests.support.traced_steps import FINE, FULL, INF, NOTANUMBER, OVERFLOWN, Step

NAN = math.nan


def bad_weight(trace: TraceBuilder, step: int, *, optimizer: int = 0) -> None:
    traced = Step(trace, step=step)
    weight = traced.entry(Node.PARAMETER, "head.weight", out=NOTANUMBER)
    traced.loss(traced.op("mm", traced.entry(), weight, out=NOTANUMBER))
    trace.incident(step=step, optimizer=optimizer, trigger=Trigger.NONFINITE_LOSS, loss=NAN)


def told(trace: TraceBuilder) -> Incident:
    (incident,) = diagnose(trace.close()).incidents
    return incident


# -- since when ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "resumed", "from_the_start"), [(0, False, True), (2, False, False), (2, True, True)])
def test_before_the_first_step_no_step_can_have_written_a_weight(
    step: int, resumed: bool, from_the_start: bool, run_folder: Path
) -> None:
    trace = TraceBuilder(run_folder)
    for number in range(step + 1):
        trace.step(loss=NAN if number == step else 2.0)
    if resumed:
        trace.event(EventKind.RESUME, "torch", step=step)
    bad_weight(trace, step)
    incident = told(trace)
    assert incident.cause is Cause.BAD_WEIGHT
    assert ("no step came before" in incident.explanation) == from_the_start
    assert any("checkpoint" in remedy.text for remedy in incident.remedies) != from_the_start


def test_what_was_bad_from_the_start_is_not_blamed_on_a_step_that_it_spoilt(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(3):
        trace.step(loss=NAN, grad_norm=NAN, scale=None)
        bad_weight(trace, step)
    incident = told(trace)
    assert (incident.step, incident.last_step, incident.count, incident.written_by) == (0, 2, 3, None)
    assert "the optimizer took them" not in incident.explanation


# -- how far values had grown -------------------------------------------------------------------------------------


def float32_overflow(trace: TraceBuilder, step: int) -> None:
    traced = Step(trace, step=step)
    raised = traced.op("exp", traced.entry(out=(0.0, 100.0), dtype=FULL), out=(1.0, INF), dtype=FULL, module="head")
    traced.loss(traced.op("mean", raised, out=(INF, INF), dtype=FULL))
    trace.incident(step=step, trigger=Trigger.NONFINITE_LOSS, loss=INF)


@pytest.mark.parametrize(
    ("losses", "grew"),
    [
        ([2.0, 3.0, 50.0, 900.0], True),
        ([2.0] * 20 + [30.0, 25.0, 400.0], True),  # not at every step
        ([2.0, 3.0, 2.0, 1.5], False),
        ([900.0, 50.0, 3.0, 2.0], False),
        ([], False),
    ],
)
def test_the_learning_rate_is_blamed_where_the_loss_had_grown(
    losses: list[float], grew: bool, run_folder: Path
) -> None:
    trace = TraceBuilder(run_folder)
    for loss in [*losses, INF]:
        trace.step(loss=loss, scale=None)
    float32_overflow(trace, len(losses))
    incident = told(trace)
    assert (incident.cause, incident.op) == (Cause.DIVERGENCE, "aten.exp.default")
    assert ("loss had grown" in incident.explanation) == grew
    assert any("learning rate" in remedy.text for remedy in incident.remedies) == grew
    assert grew or "went up to 100" in incident.explanation


# -- how often ----------------------------------------------------------------------------------------------------


def test_two_optimizers_that_fail_at_one_step_are_counted_once(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(4):
        for optimizer in (0, 1):
            trace.step(step=step, optimizer=optimizer, loss=NAN, skipped=True)
            trace.incident(step=step, optimizer=optimizer, trigger=Trigger.NONFINITE_LOSS, loss=NAN)
        bad_weight_of_both(trace, step)
    incident = next(each for each in diagnose(trace.close()).incidents if each.cause is Cause.DIV_ZERO)
    assert steps_in_words(incident) == "steps 0 to 3 (4 times)"


def bad_weight_of_both(trace: TraceBuilder, step: int) -> None:
    for source in ("replay", "replay@1"):
        traced = Step(trace, step=step, source=source)
        traced.loss(traced.op("reciprocal", traced.entry(out=(0.0, 1.0)), out=(1.0, INF), line=7))


def test_a_collapse_counts_the_skips_of_its_own_stretch(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    scale = 2.0**20
    for step in range(70):
        skipped = step < 6 or step >= 40
        trace.step(scale=scale, skipped=skipped)
        scale *= 0.5 if skipped else 1.0
    incident = next(each for each in diagnose(trace.close()).incidents if each.cause is Cause.SCALE_OVERFLOW)
    assert incident.count == incident.last_step - incident.step + 1


# -- what is harmless ---------------------------------------------------------------------------------------------


def metric_in(trace: TraceBuilder, *, line: int) -> None:
    """A logarithm of zero that fails in forward, and one that nothing reads when backward computes a block again."""
    traced = Step(trace)
    x = traced.entry(out=(0.0, 1.0), dtype=FULL)
    bad = traced.op("log", x, out=(-INF, 0.0), dtype=FULL, line=7)
    traced.loss(traced.op("mean", bad, out=(-INF, -INF), dtype=FULL))
    traced.op("log", x, out=(-INF, 0.0), dtype=FULL, phase=Phase.RECOMPUTE, line=line)
    trace.step(loss=NAN)
    trace.incident(trigger=Trigger.NONFINITE_LOSS, loss=NAN)


@pytest.mark.parametrize(("line", "told_twice"), [(7, False), (8, True)])
def test_a_line_that_is_to_blame_is_not_harmless_when_it_runs_again(
    line: int, told_twice: bool, run_folder: Path
) -> None:
    trace = TraceBuilder(run_folder)
    metric_in(trace, line=line)
    causes = [each.cause for each in diagnose(trace.close()).incidents]
    assert Cause.LOG_ZERO in causes
    assert (Cause.BENIGN_METRIC_NAN in causes) == told_twice


@pytest.mark.parametrize(
    ("by", "out", "cause"),
    [
        ("tanh", OVERFLOWN, Cause.BENIGN_SATURATED),
        ("sigmoid", (-INF, INF), Cause.BENIGN_SATURATED),
        ("clamp", OVERFLOWN, Cause.BENIGN_SATURATED),
        ("where.self", OVERFLOWN, Cause.BENIGN_MASKED_INTERNAL),
        ("nan_to_num", NOTANUMBER, Cause.BENIGN_MASKED_INTERNAL),
    ],
)
def test_an_infinity_that_a_bounded_function_takes_is_no_masked_nan(
    by: str, out: tuple[float, float], cause: Cause, run_folder: Path
) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    traced = Step(trace, source="live")
    square = traced.op("mul.Tensor", traced.entry(out=(-300.0, 300.0)), out=out)
    traced.loss(traced.op(by, square, out=FINE))
    incident = told(trace)
    assert (incident.cause, incident.severity) == (cause, Severity.INFO)
    assert "NaN" not in incident.explanation


# -- a loss scale at work -----------------------------------------------------------------------------------------


def scaled_overflow(trace: TraceBuilder, step: int) -> None:
    """Scaled gradients that overflow in backward."""
    traced = Step(trace, step=step)
    forward = traced.op("mm", traced.entry())
    traced.loss(forward)
    traced.gradient(traced.backward("mm", traced.entry(), out=OVERFLOWN, of=forward, grad_fn="MmBackward0", line=7))
    trace.incident(step=step)


@pytest.mark.parametrize(
    ("start", "turns", "good", "calm"),
    [
        (64.0, 9, 1, False),  # half of the steps, down to 2**-3
        (2.0**24, 16, 60, True),  # long, and it ends
    ],
)
def test_calibration_is_harmless_where_it_ends(
    start: float, turns: int, good: int, calm: bool, run_folder: Path
) -> None:
    trace = TraceBuilder(run_folder)
    scale = start
    for _ in range(turns):
        scaled_overflow(trace, trace.step(scale=scale, skipped=True).step)
        scale /= 2
        trace.step(scale=scale)
    for _ in range(good):
        trace.step(scale=scale)
    diagnosis = diagnose(trace.close())
    assert (diagnosis.verdict is Verdict.HEALTHY) == calm
    assert any(each.cause.is_benign for each in diagnosis.incidents) == calm


@pytest.mark.parametrize(("good", "said"), [(3, "halved until the gradients fit"), (0, "was being halved when")])
def test_that_a_scale_has_found_its_place_is_said_when_it_has(good: int, said: str, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(2 + good):
        trace.step(scale=2.0 ** (16 - min(step, 2)), skipped=step < 2)
    for step in range(2):
        scaled_overflow(trace, step)
    incident = told(trace)
    assert incident.cause is Cause.BENIGN_INITIAL_CALIBRATION
    assert said in incident.explanation


@pytest.mark.parametrize(
    ("skips", "after", "calm"),
    [([25], 5, True), ([25, 26], 5, False), ([25, 35], 5, False), ([25], 0, False)],
)
def test_one_skip_that_is_not_explained_is_told_calmly(
    skips: list[int], after: int, calm: bool, run_folder: Path
) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(max(skips) + 1 + after):
        trace.step(scale=1024.0, skipped=step in skips)
    for step in skips:
        trace.incident(step=step, replay=ReplayStatus.DIVERGED, replay_reason="other parameters")
    diagnosis = diagnose(trace.close())
    assert (diagnosis.verdict is Verdict.HEALTHY) == calm
    causes = {each.cause for each in diagnosis.incidents}
    assert causes == {Cause.BENIGN_SINGLE_SKIP if calm else Cause.UNKNOWN}


@pytest.mark.parametrize(
    ("skips", "cause"), [([25], Cause.BENIGN_SINGLE_SKIP), ([25, 26], Cause.BENIGN_SCALE_ADJUSTMENT)]
)
def test_one_skip_that_was_not_run_again_says_nothing_of_the_scale(
    skips: list[int], cause: Cause, run_folder: Path
) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(31):
        trace.step(scale=2.0 ** (10 - sum(step > skip for skip in skips)), skipped=step in skips)
    for step in skips:
        trace.incident(step=step, replay=ReplayStatus.UNAVAILABLE, replay_reason="the step's tape took too much memory")
    diagnosis = diagnose(trace.close())
    assert diagnosis.verdict is Verdict.HEALTHY
    assert {each.cause for each in diagnosis.incidents} == {cause}
    assert all(("took too much memory" in each.explanation) == (len(skips) == 1) for each in diagnosis.incidents)


# -- a loss scale as a number ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "cause"), [(2.0**16, Cause.SCALE_OVERFLOW), (1e5, Cause.LITERAL_OVERFLOW)])
def test_a_constant_that_is_the_loss_scale_is_called_that(factor: float, cause: Cause, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step(loss=NAN, scale=2.0**16, skipped=True)
    traced = Step(trace)
    scaled = traced.op("mul.Tensor", traced.entry(), out=OVERFLOWN, scalars={"other": factor})
    traced.loss(traced.op("mean", scaled, out=OVERFLOWN))
    trace.incident(trigger=Trigger.NONFINITE_LOSS, loss=INF)
    incident = told(trace)
    assert incident.cause is cause
    assert ("multiplies by the loss scale" in incident.explanation) == (cause is Cause.SCALE_OVERFLOW)


def test_no_scale_is_said_to_have_been_tried_where_none_was(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(30):
        trace.step(scale=2.0 ** (10 - step), skipped=True)
    scaled_overflow(trace, 0)
    found = (each for each in diagnose(trace.close()).incidents if each.cause is Cause.SCALE_OVERFLOW)
    assert all("that was tried" not in remedy.text for each in found for remedy in each.remedies)
