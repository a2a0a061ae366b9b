"""The verdict on whole runs: what is told first, what is told once, and what is said where nothing can be known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ampscope import diagnose, open_run
from ampscope.analysis.cures import trials
from ampscope.analysis.results import Checked
from ampscope.errors import RunNotFound
from ampscope.report.json import as_json
from ampscope.trace.schema import Change, EventKind, Node, Phase, ReplayStatus, Source, Trial, Trigger
from ampscope.trace.vocabulary import (
    DEVICE_FAILED,
    LOOK_EVERY,
    STATE_LOOK,
    STEP_RECORD,
    STEP_TAPE,
    SWITCHED_OFF,
    Cause,
    MistakeForm,
    Severity,
    Verdict,
)
from tests.support.trace_builder import TraceBuilder
from tests.support.traced_steps import FULL, INF, NOTANUMBER, OVERFLOWN, Step

NAN = math.nan


def overflow(trace: TraceBuilder, step: int, *, line: int = 7, source: str = Source.REPLAY) -> None:
    """A product that overflows in forward and makes the loss NaN."""
    traced = Step(trace, step=step, source=source)
    x = traced.entry(out=(-300.0, 300.0))
    weight = traced.entry(Node.PARAMETER, "attn.proj.weight", out=(-300.0, 300.0))
    product = traced.op("bmm", x, weight, out=OVERFLOWN, module="attn", module_type="Attention", line=line)
    traced.loss(traced.op("mean", product, out=NOTANUMBER, module="", phase=Phase.LOSS, dtype=FULL))
    trace.incident(step=step, trigger=Trigger.NONFINITE_LOSS, loss=NAN, bad_params=("attn.proj.weight",))


def scaled_overflow(trace: TraceBuilder, step: int, **columns: Any) -> None:
    """Scaled gradients that overflow in backward: what a loss scale does while it calibrates."""
    traced = Step(trace, step=step)
    forward = traced.op("mm", traced.entry())
    traced.loss(forward)
    bad = traced.backward("mm", traced.entry(), out=OVERFLOWN, of=forward, grad_fn="MmBackward0", line=7)
    traced.gradient(bad)
    trace.incident(step=step, **columns)


def calibrating(trace: TraceBuilder, skips: int, good: int = 30, start: float = 65536.0) -> None:
    """Steps at a scale that halves ``skips`` times, each skip an incident, and then holds."""
    for step in range(skips + good):
        trace.step(scale=start / 2 ** min(step, skips), skipped=step < skips)
    for step in range(skips):
        scaled_overflow(trace, step)


def train(trace: TraceBuilder, losses: Sequence[float]) -> None:
    for loss in losses:
        trace.step(loss=loss, skipped=not math.isfinite(loss))


# -- healthy runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("closed", "said"), [(True, "Nothing was observed: no"), (False, "Nothing was observed yet")])
def test_a_run_without_a_step_is_not_observed(closed: bool, said: str, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    diagnosis = diagnose(trace.close() if closed else trace.leave_open())
    assert (diagnosis.verdict, diagnosis.primary, diagnosis.run.steps) == (Verdict.NOT_OBSERVED, None, 0)
    assert diagnosis.summary.startswith(said)


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        ([EventKind.UNSEEN], Verdict.NOT_OBSERVED),
        ([EventKind.UNSEEN, EventKind.SEEN], Verdict.HEALTHY),
        ([], Verdict.HEALTHY),
    ],
)
def test_steps_without_a_call_of_the_model_are_not_observed(
    told: list[EventKind], verdict: Verdict, run_folder: Path
) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0] * 5)
    for kind in told:
        trace.event(kind, "no call was seen", step=2)
    diagnosis = diagnose(trace.close())
    assert diagnosis.verdict is verdict
    assert ("no call was seen" in diagnosis.summary) == (verdict is Verdict.NOT_OBSERVED)


def test_a_segment_in_which_calls_are_seen_is_observed(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    trace.event(EventKind.UNSEEN, "no call was seen", step=1)
    trace.step(segment=1)
    assert diagnose(trace.close()).verdict is Verdict.HEALTHY


def test_a_record_that_ended_with_the_device_names_the_training(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    text = f"{STEP_RECORD} {SWITCHED_OFF}, {DEVICE_FAILED} (AcceleratorError: CUDA error: device-side assert triggered)"
    trace.event(EventKind.WARNING, text, step=1)
    found = diagnose(trace.close())
    assert found.verdict is Verdict.NOT_OBSERVED
    assert "CUDA_LAUNCH_BLOCKING=1" in found.summary
    assert "fault of AMPscope" not in found.summary


@pytest.mark.parametrize(
    ("part", "segment", "step", "said"),
    [
        (STEP_RECORD, 0, 5, "Nothing is known of the run from step 5 on: the step record switched itself off after"),
        (
            STEP_TAPE,
            0,
            3,
            "At step 3 the step tape switched itself off after ValueError: no (step.py:3). From there on",
        ),
        (STEP_TAPE, 0, 5, "At step 5 the step tape switched itself off"),  # at the run's end, too
        ("the look at exceptions", 0, 3, "At step 3 the look at exceptions switched itself off after"),
        (STEP_RECORD, 1, 5, "At step 5 the step record switched itself off"),  # of a segment before the newest
        ("the webhook", 0, 3, ""),  # others were not told: that is no part of a verdict
    ],
)
def test_capture_that_switched_itself_off_is_never_just_healthy(
    part: str, segment: int, step: int, said: str, run_folder: Path
) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0] * 5)
    trace.event(EventKind.WARNING, f"{part} {SWITCHED_OFF} after ValueError: no (step.py:3)", step=step)
    if segment:
        trace.step(segment=segment)
    diagnosis = diagnose(trace.close())
    assert diagnosis.verdict is {"": Verdict.HEALTHY, "N": Verdict.NOT_OBSERVED, "A": Verdict.PARTLY_OBSERVED}[said[:1]]
    assert not said or (said in diagnosis.summary and "report it" in diagnosis.summary)
    assert bool(diagnosis.unobserved) == bool(said)


def test_capture_that_switched_itself_off_before_any_step_says_why(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.event(EventKind.WARNING, f"{STEP_RECORD} {SWITCHED_OFF} after ValueError: no (step.py:3)")
    diagnosis = diagnose(trace.close())
    assert (diagnosis.verdict, diagnosis.run.steps) == (Verdict.NOT_OBSERVED, 0)
    assert "from step 0 on" in diagnosis.summary


def test_a_part_that_switched_itself_off_is_told_beside_a_problem_and_of_every_rank(run_folder: Path) -> None:
    off = f"the op tracer {SWITCHED_OFF} after ValueError: no (tracer.py:3)"
    for rank in range(3):
        trace = TraceBuilder(run_folder, rank=rank, world_size=4)
        train(trace, [2.0, math.nan if rank == 2 else 2.0])
        if rank:
            trace.event(EventKind.WARNING, off, step=rank)
        trace.close()
    found = diagnose(run_folder)
    assert found.verdict is Verdict.PROBLEM
    assert found.unobserved[0] == f"At step 1 of ranks 1 and 2 {off}."
    assert found.unobserved[0] in found.note


def test_what_was_not_checked_is_told_with_what_was(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder, world_size=2)
    for step in range(LOOK_EVERY):
        if step not in (5, 6):
            trace.step(step=step, grad_norm=None, found_inf=None, traced="live" if step in (0, 8) else "")
    trace.event(EventKind.CLOSE, "", step=LOOK_EVERY)
    diagnosis = diagnose(trace.close())
    assert diagnosis.checked == Checked(traced=2, state_looks=8, lost=2)
    assert diagnosis.summary == (
        "No numerical fault in 62 steps; checked: ops in 2 of them, weights at 8 looks; not checked: gradients, 2 "
        "steps that the trace lacks, rank 1."
    )


def test_weights_count_as_looked_at_until_that_look_switched_itself_off(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0] * 20)
    trace.event(EventKind.WARNING, f"{STATE_LOOK} {SWITCHED_OFF} after ValueError: no (state_watch.py:3)", step=4)
    trace.event(EventKind.CLOSE, "", step=20)
    diagnosis = diagnose(trace.close())
    assert (diagnosis.verdict, diagnosis.checked.state_looks) == (Verdict.PARTLY_OBSERVED, 3)


def test_a_problem_is_told_although_no_call_was_seen(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0, math.nan])
    trace.event(EventKind.UNSEEN, "no call was seen", step=1)
    assert diagnose(trace.close()).verdict is Verdict.PROBLEM


def test_a_run_in_which_nothing_happens_is_healthy(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder, device="cpu", model="GPT", parameters=123)
    train(trace, [2.0] * 1200)
    diagnosis = diagnose(trace.close())
    assert diagnosis.verdict is Verdict.HEALTHY
    assert diagnosis.summary == (
        "No numerical fault in 1,200 steps; checked: gradients in all, weights at 25 looks; not checked: ops (no step "
        "was traced)."
    )
    assert diagnosis.checked == Checked(gradients=1200, state_looks=25)
    assert (diagnosis.incidents, diagnosis.findings) == ((), ())
    assert (diagnosis.run.model, diagnosis.run.parameters, diagnosis.run.steps) == ("GPT", 123, 1200)


def test_a_run_of_one_step_is_told_in_the_singular(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step(loss=2.0, traced="live")
    said = "No numerical fault in 1 step; checked: ops in it, gradients in it, weights at 1 look."
    assert diagnose(trace.close()).summary == said


def test_a_scale_that_calibrates_is_told_once_and_calmly(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    calibrating(trace, skips=4)
    diagnosis = diagnose(trace.close())
    (incident,) = diagnosis.incidents
    assert diagnosis.verdict is Verdict.HEALTHY
    assert diagnosis.primary is None
    assert (incident.cause, incident.severity) == (Cause.BENIGN_INITIAL_CALIBRATION, Severity.INFO)
    assert (incident.step, incident.last_step, incident.count) == (0, 3, 4)
    assert incident.remedies == ()
    said = "No numerical fault in 34 steps (4 skipped while the loss scale found its place); checked: gradients in all"
    assert diagnosis.summary.startswith(said)


def test_growth_that_went_too_far_is_told_calmly(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(100):
        trace.step(scale=1024.0 if step < 60 or step > 80 else 2048.0, skipped=step == 80)
    scaled_overflow(trace, 80)
    (incident,) = diagnose(trace.close()).incidents
    assert incident.cause is Cause.BENIGN_PERIODIC_GROWTH


def test_a_scale_that_collapses_is_a_problem(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    calibrating(trace, skips=25, good=0)
    diagnosis = diagnose(trace.close())
    assert diagnosis.primary is not None
    assert diagnosis.primary.cause is Cause.SCALE_OVERFLOW
    assert diagnosis.primary.phase == "backward"
    assert (diagnosis.primary.step, diagnosis.primary.last_step, diagnosis.primary.count) == (0, 24, 25)


def test_a_forward_that_overflows_during_calibration_is_not_calmed(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    calibrating(trace, skips=3)
    overflow(trace, 1)
    diagnosis = diagnose(trace.close())
    assert diagnosis.primary is not None
    assert (diagnosis.primary.cause, diagnosis.primary.step) == (Cause.FP16_OVERFLOW, 1)


@pytest.mark.parametrize(("later", "first"), [("an op", Cause.DIV_ZERO), ("a weight", Cause.UNKNOWN)])
def test_a_skip_that_no_replay_could_look_at_gives_way_to_one_like_it_with_an_origin(
    later: str, first: Cause, run_folder: Path
) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(40):
        trace.step(skipped=step in (12, 16))
    trace.incident(step=12, scale=None, replay=ReplayStatus.UNAVAILABLE, replay_reason="its making was not seen")
    traced = Step(trace, step=16)
    weight = traced.entry(Node.PARAMETER, "fc.weight", out=OVERFLOWN if later == "a weight" else (0.0, 1.0))
    handed = traced.op("mm", traced.entry(), weight, out=(0.0, 1.0))
    traced.loss(handed)
    traced.gradient(traced.backward("div.Tensor", handed, weight, out=NOTANUMBER, of=handed, dtype=FULL))
    trace.incident(step=16, scale=None)
    diagnosis = diagnose(trace.close())
    assert diagnosis.primary is not None
    assert (diagnosis.primary.cause, len(diagnosis.incidents)) == (first, 2)


# -- an incident ----------------------------------------------------------------------------------------------------


def test_an_incident_is_told_with_its_origin_and_the_way_to_the_loss(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0, 2.0, NAN])
    overflow(trace, 2)
    diagnosis = diagnose(trace.close())
    incident = diagnosis.primary
    assert diagnosis.verdict is Verdict.PROBLEM
    assert incident == diagnosis.incidents[0]
    assert incident is not None
    assert incident.kind == "incident"
    assert (incident.step, incident.severity, incident.cause) == (2, Severity.ERROR, Cause.FP16_OVERFLOW)
    assert (incident.phase, incident.op) == ("forward", "aten.bmm.default")
    assert (incident.module, incident.module_type) == ("attn", "Attention")
    assert incident.source is not None
    assert (incident.source.file, incident.source.line) == ("train.py", 7)
    assert [each.role for each in incident.inputs] == ["x", "attn.proj.weight"]
    assert (incident.outputs[0].dtype, incident.outputs[0].statistics.max) == ("float16", INF)
    assert [node.op for node in incident.path] == ["aten.bmm.default", "aten.mean.default", "loss"]
    assert [node.phase for node in incident.path] == ["forward"] * 3
    assert (incident.replay, incident.traced) == ("exact", "replay")
    assert incident.tripped == ("attn.proj.weight",)
    assert diagnosis.summary.startswith("Step 2 had a non-finite loss: bmm in module attn at train.py:7 is the origin")
    assert "65,504" in incident.explanation
    assert incident.remedies


def test_the_real_step_is_asked_where_there_is_no_replay(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [NAN])
    overflow(trace, 0, source=Source.LIVE)
    (incident,) = diagnose(trace.close()).incidents
    assert (incident.cause, incident.traced) == (Cause.FP16_OVERFLOW, "live")


def test_an_input_is_named_with_the_module_that_read_it(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [NAN])
    traced = Step(trace)
    batch = traced.entry(name="args[0]", out=NOTANUMBER, module="")
    traced.loss(traced.op("mm", batch, out=NOTANUMBER, module="encoder"))
    trace.incident(trigger=Trigger.NONFINITE_LOSS)
    (incident,) = diagnose(trace.close()).incidents
    assert (incident.cause, incident.op, incident.module) == (Cause.BAD_INPUT, "input", "encoder")
    assert "args[0]" in incident.explanation


def test_an_overflow_that_a_norm_swallowed_is_told_though_the_loss_is_fine(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0])
    traced = Step(trace)
    square = traced.op("pow.Tensor_Scalar", traced.entry(), out=(0.0, INF), scalars={"exponent": 2}, module="norm")
    traced.loss(traced.op("rsqrt", square, out=(0.0, 1.0)))
    trace.incident(trigger=Trigger.ABSORBED_OVERFLOW)
    (incident,) = diagnose(trace.close()).incidents
    assert (incident.cause, incident.module) == (Cause.FP16_OVERFLOW, "norm")


def test_an_overflow_that_the_code_took_for_a_number_is_told_with_what_did(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0])
    traced = Step(trace)
    square, harmless = (traced.op("square", traced.entry(), out=(0.0, INF), module=name) for name in ("norm", "other"))
    made = traced.op("nan_to_num", square, line=7)
    traced.loss(traced.op("add.Tensor", made, traced.op("clamp", harmless)))
    known = {"ops": [square], "hidden": [[square, made]], "gradients_apart": 0.62, "loss_apart": 0.01}
    trace.incident(trigger=Trigger.ABSORBED_OVERFLOW, evidence=json.dumps(known))
    trace.replay(Change.FP32, Trial.FINITE)
    trace.replay(Change.MODULES_FP32, Trial.NONFINITE, modules=("norm",))
    incident = diagnose(trace.close()).incidents[0]
    assert (incident.cause, incident.module) == (Cause.FP16_OVERFLOW, "norm")
    assert incident.explanation.endswith(
        "nan_to_num at train.py:7 made finite numbers of it, so neither the loss nor a gradient shows it. The same "
        "step in float32 has gradients that differ by 62% of their size."
    )
    assert trials.in_words(incident) == "Run again, the step with norm in float32 does not agree with float32."


def test_an_overflow_at_the_end_of_a_loss_that_ran_away_is_divergence(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0, 3.0, 50.0, 900.0, NAN])
    overflow(trace, 4)
    (incident,) = diagnose(trace.close()).incidents
    assert (incident.cause, incident.op) == (Cause.DIVERGENCE, "aten.bmm.default")


def test_the_loss_of_the_step_itself_counts_where_it_goes_on_rising(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.2, 2.1, 4.7, 190.0])
    trace.step(loss=6e7, skipped=True)
    scaled_overflow(trace, 4, loss=6e7)
    (incident,) = diagnose(trace.close()).incidents
    assert incident.cause is Cause.DIVERGENCE
    assert "from about 2.1 to 190" in incident.explanation


@pytest.mark.parametrize(("wide", "cause"), [(1e10, Cause.DIVERGENCE), (90.0, Cause.FP16_OVERFLOW)])
def test_so_does_its_loss_in_float32_where_its_own_dtype_cannot_hold_it(
    run_folder: Path, wide: float, cause: Cause
) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [1.2, 1.1, 1.6, 60.0, math.inf])
    overflow(trace, 4)
    trace.replay(Change.FP32, Trial.FINITE, loss=wide, step=4)
    (incident,) = diagnose(trace.close()).incidents
    assert incident.cause is cause


@pytest.mark.parametrize("losses", [[2.0, 3.0, 9.0, 30.0, NAN], [NAN], [1e4, 1e3, 2.0, 1.0, NAN]])
def test_an_overflow_after_an_ordinary_loss_is_not_divergence(run_folder: Path, losses: list[float]) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, losses)
    overflow(trace, len(losses) - 1)
    (incident,) = diagnose(trace.close()).incidents
    assert incident.cause is Cause.FP16_OVERFLOW


@pytest.mark.parametrize(("skipped", "loss"), [(True, 3300.0), (False, 3100.0)])
def test_a_scale_that_comes_down_after_the_loss_jumped_once_is_no_divergence(
    run_folder: Path, skipped: bool, loss: float
) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [0.03, 0.07])
    trace.step(loss=3200.0, skipped=skipped)
    trace.step(loss=loss, skipped=True)
    train(trace, [2800.0])
    scaled_overflow(trace, 3)
    diagnosis = diagnose(trace.close())
    assert Cause.DIVERGENCE not in {each.cause for each in diagnosis.incidents}
    assert diagnosis.verdict is Verdict.HEALTHY


@pytest.mark.parametrize(("loss", "skips", "after"), [(2e4, 3, []), (20.0, 3, []), (2e4, 2, []), (2e4, 3, [2.5])])
def test_skips_that_end_a_run_whose_loss_has_jumped_are_divergence(
    run_folder: Path, loss: float, skips: int, after: list[float]
) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0, 3.0, 2.5, 2.0, 3.0])
    for _ in range(skips):
        trace.step(loss=loss, skipped=True)
    train(trace, after)
    scaled_overflow(trace, 5, loss=loss)
    diagnosis = diagnose(trace.close())
    diverged = (loss, skips, after) == (2e4, 3, [])
    assert (diagnosis.verdict is Verdict.PROBLEM) == diverged
    assert (Cause.DIVERGENCE in {each.cause for each in diagnosis.incidents}) == diverged


# -- what cannot be known -------------------------------------------------------------------------------------------


def test_without_a_trace_the_origin_is_unknown_and_why(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0, NAN])
    trace.incident(step=1, replay=ReplayStatus.UNAVAILABLE, replay_reason="the tape was given up after 20,000 calls")
    diagnosis = diagnose(trace.close())
    (incident,) = diagnosis.incidents
    assert (incident.cause, incident.op, incident.source) == (Cause.UNKNOWN, "", None)
    assert incident.explanation == "The origin is not known: the tape was given up after 20,000 calls."
    assert diagnosis.summary == f"Step 1 had non-finite gradients. {incident.explanation}"


def failed_once(trace: TraceBuilder, *, given_again: int = 5) -> None:
    """A step that went wrong as it ran, and its replay, which did not; each was given ``x`` with a checksum."""
    train(trace, [NAN])
    entry = trace.site(Node.INPUT, name="x", in_dtypes=(), in_shapes=())
    product = trace.site("aten.relu.default", line=7)
    loss = trace.site(Node.LOSS, file="")
    for source, end, checksum in ((Source.LIVE, NAN, 5), (Source.REPLAY, 1.0, given_again)):
        x = trace.op(entry, source=source, checksum=checksum)
        made = trace.op(product, source=source, min=end, max=end)
        sink = trace.op(loss, source=source, min=end, max=end)
        trace.edge(x, made, source=source)
        trace.edge(made, sink, source=source)
    trace.incident(trigger=Trigger.NONFINITE_LOSS, replay=ReplayStatus.NOT_REPRODUCED)


def test_a_replay_that_is_the_same_to_the_last_bit_and_finite_points_outside_of_torch(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    failed_once(trace)
    (incident,) = diagnose(trace.close()).incidents
    assert (incident.cause, incident.phase) == (Cause.HARDWARE_TRANSIENT, "forward")
    assert "the same to the last bit" in incident.explanation


def test_a_replay_that_was_given_something_else_does_not(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    failed_once(trace, given_again=6)
    (incident,) = diagnose(trace.close()).incidents
    assert incident.cause is Cause.UNKNOWN


def test_a_replay_of_a_step_that_was_not_traced_does_not(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [NAN])
    traced = Step(trace)
    traced.loss(traced.op("mm", traced.entry()))
    trace.incident(trigger=Trigger.NONFINITE_LOSS, replay=ReplayStatus.NOT_REPRODUCED)
    (incident,) = diagnose(trace.close()).incidents
    assert incident.cause is Cause.UNKNOWN
    assert "no trace of how it first ran" in incident.explanation


def test_a_step_of_which_two_replays_differ_proves_nothing_of_the_device(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    failed_once(trace)
    trace.replay(Change.NONE, Trial.FINITE, reason="two replays of the step differ: it is not deterministic")
    (incident,) = diagnose(trace.close()).incidents
    assert incident.cause is Cause.UNKNOWN


def test_a_loss_of_nan_that_nobody_reported_is_not_called_healthy(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0, NAN, 2.0, math.inf])
    diagnosis = diagnose(trace.close())
    (incident,) = diagnosis.incidents
    assert diagnosis.verdict is Verdict.PROBLEM
    assert (incident.step, incident.last_step, incident.count, incident.cause) == (1, 3, 2, Cause.UNKNOWN)
    assert "no incident was recorded" in diagnosis.summary


def test_a_step_without_a_loss_is_no_bad_loss(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step(loss=None)
    assert diagnose(trace.close()).verdict is Verdict.HEALTHY


# -- what is told first, and once -----------------------------------------------------------------------------------


def test_the_earliest_error_is_told_first(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0, 2.0, NAN, NAN])
    overflow(trace, 3, line=9)
    overflow(trace, 2, line=7)
    diagnosis = diagnose(trace.close())
    assert [incident.step for incident in diagnosis.incidents] == [2, 3]
    assert diagnosis.primary == diagnosis.incidents[0]


def test_an_error_is_told_before_a_warning_that_came_earlier(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(20):
        trace.step(skipped=step in (1, 2), loss=NAN if step == 15 else 2.0)
    trace.finding(Cause.MISUSE_SCALER_STATE_NOT_RESTORED, step=1)
    overflow(trace, 15)
    diagnosis = diagnose(trace.close())
    (warning,) = diagnosis.findings
    assert (warning.severity, warning.step) == (Severity.WARNING, 1)
    assert diagnosis.primary == diagnosis.incidents[0]


def test_a_mistake_is_told_before_the_failure_it_leads_to(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0, NAN])
    overflow(trace, 1)
    trace.finding(Cause.MISUSE_NO_UNSCALE, step=1)
    diagnosis = diagnose(trace.close())
    assert diagnosis.primary == diagnosis.findings[0]
    assert diagnosis.primary.kind == "finding"


@pytest.mark.parametrize(("in_forward", "first"), [(True, Cause.FP16_OVERFLOW), (False, Cause.MISUSE_MISSING_SCALER)])
def test_a_missing_scaler_does_not_make_what_the_forward_made(in_forward: bool, first: Cause, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0, 2.0, NAN])
    (overflow if in_forward else scaled_overflow)(trace, 2)
    trace.finding(Cause.MISUSE_MISSING_SCALER, step=0, form=MistakeForm.NO_SCALER)
    diagnosis = diagnose(trace.close())
    assert diagnosis.primary is not None
    assert diagnosis.primary.cause is first
    assert [each.cause for each in diagnosis.findings] == [Cause.MISUSE_MISSING_SCALER]


def test_a_warning_alone_is_a_problem_and_what_is_harmless_is_not(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(20):
        trace.step(skipped=step < 2, scale=65536.0 / 2 ** min(step, 2))
    trace.finding(Cause.MISUSE_SCALER_STATE_NOT_RESTORED, step=0)
    scaled_overflow(trace, 0)
    diagnosis = diagnose(trace.close())
    assert diagnosis.verdict is Verdict.PROBLEM
    assert diagnosis.primary == diagnosis.findings[0]
    assert diagnosis.incidents[0].severity is Severity.INFO


def test_one_origin_that_comes_back_is_one_incident(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0, NAN, 2.0, NAN, NAN, 2.0, NAN])
    for step in (1, 3, 4):
        overflow(trace, step, line=7)
    overflow(trace, 6, line=9)
    first, other = diagnose(trace.close()).incidents
    assert (first.step, first.last_step, first.count) == (1, 4, 3)
    assert (other.step, other.last_step, other.count) == (6, 6, 1)


def test_every_rank_is_examined(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = TraceBuilder(folder, world_size=2)
    train(first, [2.0, 2.0])
    first.close()
    second = TraceBuilder(folder, rank=1, world_size=2)
    train(second, [2.0, NAN])
    overflow(second, 1)
    (incident,) = diagnose(second.close()).incidents
    assert (incident.step, incident.module) == (1, "attn")


# -- how it is asked, and what it gives -----------------------------------------------------------------------------


def test_an_open_run_and_the_path_of_its_folder_give_the_same(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [NAN])
    overflow(trace, 0)
    folder = trace.close()
    with open_run(folder) as run:
        assert as_json(diagnose(run)) == as_json(diagnose(folder)) == as_json(diagnose(str(folder)))


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound):
        diagnose(tmp_path / "nothing")


def _strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_diagnosis_is_the_json_that_is_promised(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    train(trace, [2.0, NAN])
    overflow(trace, 1)
    trace.finding(step=1)
    told = _strict(as_json(diagnose(trace.close())))
    assert told.keys() >= {"schema", "run", "verdict", "summary", "primary", "incidents", "findings"}
    assert (told["schema"], told["verdict"]) == (1, "problem")
    (incident,) = told["incidents"]
    promised = "kind step last_step count severity cause phase op module module_type source inputs outputs path replay"
    assert incident.keys() >= {*promised.split(), "fp32_ok", "explanation", "remedies"}
    assert incident["source"].keys() == {"file", "line", "function", "code"}
    assert (incident["kind"], incident["severity"], incident["cause"]) == ("incident", "error", "fp16_overflow")
    assert incident["outputs"][0]["max"] == "Infinity"
    assert incident["path"][1]["min"] == "NaN"
    assert all(
        remedy.keys() >= {"text", "code", "verified", "kind", "diff", "cost", "changes_good_values"}
        for remedy in incident["remedies"]
    )
    (finding,) = told["findings"]
    assert finding.keys() >= {"kind", "step", "severity", "cause", "phase", "source", "explanation", "remedies"}
    assert (finding["kind"], finding["phase"]) == ("finding", "usage")
    assert told["primary"] == finding
