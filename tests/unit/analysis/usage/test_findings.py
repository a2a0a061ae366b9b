"""Usage mistakes that only the history of a run shows, and those that capture reported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ampscope import diagnose, open_run
from ampscope.analysis.diagnosis.gate import Outcome, gate
from ampscope.analysis.diagnosis.gate_limits import Limits
from ampscope.analysis.results import Diagnosis
from ampscope.analysis.usage.mistakes import usage_checks
from ampscope.analysis.words import when_in_words
from ampscope.trace.schema import ScalerAction
from ampscope.trace.vocabulary import Cause, MistakeForm, Severity, Verdict
from tests.support.trace_builder import START, TraceBuilder
from tests.support.traced_steps import OVERFLOWN, Step

SKIPPED_AT = (3, 7, 8)


def trained(folder: Path, rates: Sequence[float | None], *, seen: bool = True) -> Diagnosis:
    """A run whose steps were attempted at these learning rates, and a scheduler seen to step after a skipped one."""
    trace = TraceBuilder(folder)
    for step, rate in enumerate(rates):
        trace.step(lr=rate, skipped=step in SKIPPED_AT)
    if seen:
        trace.finding(Cause.MISUSE_SCHEDULER_ORDER, step=SKIPPED_AT[0], line=42)
    return diagnose(trace.close())


def test_a_scheduler_that_steps_on_though_the_optimizer_did_not(run_folder: Path) -> None:
    (finding,) = trained(run_folder, [0.1 * 0.9**step for step in range(12)]).findings
    assert finding.cause is Cause.MISUSE_SCHEDULER_ORDER
    assert finding.severity is Severity.WARNING
    assert (finding.step, finding.last_step, finding.count) == (3, 8, 3)
    assert finding.counted
    assert finding.source is not None
    assert finding.source.line == 42
    assert "3 times" in finding.explanation
    assert finding.remedies


@pytest.mark.parametrize("rate", [0.1, None])
def test_a_schedule_that_stands_still_is_still_a_step_ahead(run_folder: Path, rate: float | None) -> None:
    (finding,) = trained(run_folder, [rate] * 12).findings
    assert (finding.step, finding.last_step, finding.count) == (3, 3, 1)
    assert finding.severity is Severity.INFO
    assert "has not moved a recorded learning rate" in finding.explanation
    assert not finding.counted


@pytest.mark.parametrize(
    ("second", "count"),
    [
        ([0.2 * 0.9**step for step in range(12)], 3),  # moves on after each skipped step
        ([0.2 if step < 6 else 0.1 for step in range(12)], 1),  # moved once, after a good one
        ([0.1 if step < 4 else 0.05 for step in range(12)], 1),  # was that of the first until the first skipped step
    ],
)
def test_a_schedule_of_the_second_group_alone_is_counted(run_folder: Path, second: list[float], count: int) -> None:
    trace = TraceBuilder(run_folder)
    for step, rate in enumerate(second):
        lrs = json.dumps({"0": 0.1, "1 head": rate}) if rate != 0.1 else None
        trace.step(lr=0.1, lrs=lrs, skipped=step in SKIPPED_AT)
    trace.finding(Cause.MISUSE_SCHEDULER_ORDER, step=SKIPPED_AT[0], line=42)
    (finding,) = diagnose(trace.close()).findings
    moved = [step for step in SKIPPED_AT if second[step] != second[step + 1]]
    assert (finding.step, finding.count, finding.counted) == (3, count, bool(moved))
    assert finding.last_step == max(moved, default=3)


@pytest.mark.parametrize(
    ("steps", "skipped", "severity", "verdict"),
    [
        (200, range(3), Severity.INFO, Verdict.HEALTHY),  # a stock loop: the scale has found its place
        (4, range(3), Severity.INFO, Verdict.HEALTHY),  # the same, not long after it began
        (200, range(20, 180, 18), Severity.INFO, Verdict.HEALTHY),
        (40, range(20, 40, 3), Severity.WARNING, Verdict.AT_RISK),
        (40, range(8), Severity.WARNING, Verdict.AT_RISK),
        (14, range(10), Severity.ERROR, Verdict.PROBLEM),  # the warm-up is over before the training begins
    ],
)
def test_a_schedule_matters_by_the_share_of_steps_that_it_is_ahead(
    run_folder: Path, steps: int, skipped: range, severity: Severity, verdict: Verdict
) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(steps):
        trace.step(lr=0.1 * 0.9**step, skipped=step in skipped)
    trace.finding(Cause.MISUSE_SCHEDULER_ORDER, step=skipped[0])
    folder = trace.close()
    diagnosis = diagnose(folder)
    (finding,) = diagnosis.findings
    assert (finding.severity, diagnosis.verdict) == (severity, verdict)
    assert diagnosis.primary == (None if severity is Severity.INFO else finding)
    assert f"{len(skipped)} of {steps} steps ahead" in finding.explanation
    with open_run(folder) as run:
        assert (gate(run, Limits()).outcome is Outcome.FAILED) == (verdict is Verdict.PROBLEM)
    (check,) = (each for each in usage_checks(diagnosis) if each.cause is finding.cause)
    assert (check.found, check.noted, check.passed) == ((0, 1, False) if severity is Severity.INFO else (1, 0, False))


def test_a_schedule_that_is_ahead_does_not_hide_a_problem(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(40):
        trace.step(lr=0.1 * 0.9**step, skipped=step in range(8))
    trace.finding(Cause.MISUSE_SCHEDULER_ORDER, step=0)
    trace.finding(Cause.MISUSE_SCALER_STATE_NOT_RESTORED, step=20)
    diagnosis = diagnose(trace.close())
    assert diagnosis.verdict is Verdict.PROBLEM
    assert diagnosis.primary is not None
    assert diagnosis.primary.cause is Cause.MISUSE_SCALER_STATE_NOT_RESTORED


def test_a_rate_that_the_loop_sets_by_itself_is_its_own_affair(run_folder: Path) -> None:
    """A rate that is a function of the iteration's number moves after a skipped step too, as its author meant."""
    assert trained(run_folder, [0.1 * 0.9**step for step in range(12)], seen=False).findings == ()


SEVERAL = Cause.MISUSE_MULTIPLE_SCALERS_UPDATE


@pytest.mark.parametrize(
    ("cause", "form", "summary"),
    [
        (Cause.MISUSE_CLIP_BEFORE_UNSCALE, "", "From step 2 on, at train.py:7: The gradients still carry"),
        (
            Cause.MISUSE_MULTIPLE_SCALERS_UPDATE,
            MistakeForm.ANOTHER_SCALER,
            "From step 2 on, at train.py:7: The gradients that",
        ),
        (
            Cause.MISUSE_MULTIPLE_SCALERS_UPDATE,
            MistakeForm.UNSCALE_TWICE,
            "Step 2, at train.py:7: unscale_ is called twice",
        ),
    ],
)
def test_the_first_time_of_a_mistake_is_told_as_the_first(
    run_folder: Path, cause: Cause, form: str, summary: str
) -> None:
    """Capture takes down the first time only; what torch refuses happens once."""
    trace = TraceBuilder(run_folder)
    for _ in range(5):
        trace.step()
    trace.finding(cause, step=2, file="train.py", line=7, form=form)
    assert diagnose(trace.close()).summary.startswith(summary)


# -- a scaler that forgot -------------------------------------------------------------------------------------------


def resumed(folder: Path, *, start: float, loaded: bool) -> Diagnosis:
    """A run that had come to a scale of 1024 and was resumed with a new scaler."""
    first = TraceBuilder(folder)
    first.scaler_event(ScalerAction.INIT, scale_before=None, scale_after=65536.0)
    for step in range(6):
        first.step(scale=65536.0 / 2**step, skipped=True)
        scales = {"scale_before": 65536.0 / 2**step, "scale_after": 32768.0 / 2**step}
        first.scaler_event(ScalerAction.BACKOFF, step=step, **scales)
    first.close()
    second = TraceBuilder(folder)
    second.scaler_event(
        ScalerAction.INIT, step=6, scaler=1, time=START + 100, scale_before=None, scale_after=start, line=31
    )
    if loaded:
        second.scaler_event(
            ScalerAction.STATE_LOADED, step=6, scaler=1, time=START + 101, scale_before=start, scale_after=1024.0
        )
    second.step(scale=1024.0 if loaded else start)
    return diagnose(second.close())


def test_a_resumed_run_whose_scaler_starts_afresh(run_folder: Path) -> None:
    diagnosis = resumed(run_folder, start=65536.0, loaded=False)
    assert diagnosis.run.segments == 2
    (finding,) = diagnosis.findings
    assert finding.cause is Cause.MISUSE_SCALER_STATE_NOT_RESTORED
    assert finding.step == 6
    assert finding.counted
    assert finding.source is not None
    assert finding.source.line == 31
    assert "65,536" in finding.explanation
    assert "1,024" in finding.explanation


@pytest.mark.parametrize(("start", "loaded"), [(65536.0, True), (1024.0, False)], ids=["loaded", "same scale"])
def test_a_resumed_run_whose_scaler_goes_on_is_right(run_folder: Path, start: float, loaded: bool) -> None:
    assert resumed(run_folder, start=start, loaded=loaded).findings == ()


def test_the_first_scaler_of_a_run_has_nothing_to_restore(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.scaler_event(ScalerAction.INIT, scale_before=None, scale_after=65536.0)
    trace.step()
    assert diagnose(trace.close()).findings == ()


def preempted(folder: Path, *, checkpoint: int, init: tuple[float, int], optimizer_steps: int = 0) -> Diagnosis:
    """A run that saved its scaler at two steps and ended at another scale; resumed with a scaler in this state."""
    first = TraceBuilder(folder)
    first.scaler_event(ScalerAction.INIT, scale_before=None, scale_after=16.0, growth_tracker=0)
    for step in (0, checkpoint):
        first.scaler_event(
            ScalerAction.STATE_SAVED,
            step=step,
            scale_after=16.0 * 2 ** (step // 8),
            detail=json.dumps({"scale": 16.0 * 2 ** (step // 8), "_growth_tracker": step % 8}),
        )
    for step in range(40):
        first.step(scale=16.0 * 2 ** (step // 8))
    first.scaler_event(ScalerAction.GROWTH, step=39, scale_after=512.0)
    first.close()
    second = TraceBuilder(folder)
    begins = {"step": 40, "scaler": 1, "time": START + 100, "scale_before": None}
    second.scaler_event(ScalerAction.INIT, scale_after=init[0], growth_tracker=init[1], line=31, **begins)
    for step in range(40, 60):
        second.step(step=step, skipped=step == 40)
    if optimizer_steps:
        evidence = json.dumps({"optimizer_steps": optimizer_steps})
        second.finding(Cause.MISUSE_SCALER_STATE_NOT_RESTORED, step=40, segment=1, evidence=evidence)
    second.finding(Cause.MISUSE_CLIP_BEFORE_UNSCALE, step=45, segment=1)
    return diagnose(second.close())


@pytest.mark.parametrize(("checkpoint", "tracker"), [(20, 4), (24, 0)], ids=["in between", "as it had just grown"])
def test_a_scaler_restored_from_an_earlier_checkpoint_goes_on(run_folder: Path, checkpoint: int, tracker: int) -> None:
    """A preempted job: it ended at another scale than that of its newest checkpoint."""
    state = 16.0 * 2 ** (checkpoint // 8), tracker
    diagnosis = preempted(run_folder, checkpoint=checkpoint, init=state, optimizer_steps=0 if tracker else checkpoint)
    (other,) = diagnosis.findings
    assert other.cause is Cause.MISUSE_CLIP_BEFORE_UNSCALE
    assert other.loop_step == 45 - 40 + checkpoint
    assert diagnosis.run.loop_step == 59 - 40 + checkpoint
    assert when_in_words(other) == f"from step 45 on, the loop's step {other.loop_step}"


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [((8, 16), None), ((4, 12), 8), ((4, 7), 7), ((8, 5), 5), ((None, 12), None)],
    ids=["at the ends", "in each part", "twice in the first", "at the end of the first", "one is not known"],
)
def test_the_loop_counts_on_from_the_checkpoint_of_a_resumed_run(
    run_folder: Path, checkpoints: tuple[int | None, int], expected: int | None
) -> None:
    """Three parts of eight steps, the last two from the checkpoints that were made before these steps of the run."""
    for part, begins in enumerate((None, *checkpoints)):
        trace = TraceBuilder(run_folder)
        scaler = {"scaler": part, "time": START + 1000 * part}
        trace.scaler_event(ScalerAction.INIT, step=8 * part, scale_after=64.0, growth_tracker=begins or 99, **scaler)
        for step in range(8 * part, 8 * part + 8):
            trace.step(step=step)
            saved = json.dumps({"scale": 64.0, "_growth_tracker": step + 1})
            trace.scaler_event(ScalerAction.STATE_SAVED, step=step + 1, scale_after=64.0, detail=saved, scaler=part)
        if part == 2:
            trace.finding(Cause.MISUSE_CLIP_BEFORE_UNSCALE, step=16, segment=2)
        folder = trace.close()
    (finding,) = diagnose(folder).findings
    assert finding.loop_step == expected


@pytest.mark.parametrize(
    "init",
    [
        (65536.0, 0),  # a state that the run never had
        (64.0, 0),  # the scale of the checkpoint with another count of good steps
        (16.0, 0),  # the state with which the run began, saved before its first step
    ],
)
def test_a_scaler_in_another_state_than_the_checkpoint_is_told(run_folder: Path, init: tuple[float, int]) -> None:
    diagnosis = preempted(run_folder, checkpoint=20, init=init, optimizer_steps=20)
    finding = diagnosis.findings[0]
    assert (finding.cause, finding.step, finding.loop_step) == (Cause.MISUSE_SCALER_STATE_NOT_RESTORED, 40, None)
    assert "where the run had come to 512" in finding.explanation


def test_scalers_of_a_resumed_run_take_each_others_places_in_order(run_folder: Path) -> None:
    for segment in range(2):
        trace = TraceBuilder(run_folder)
        for scaler, scale in enumerate((1024.0, 64.0)):
            number, at = scaler + 2 * segment, 100 * segment + scaler
            trace.scaler_event(ScalerAction.INIT, scaler=number, step=segment, time=START + at, scale_after=scale)
        trace.step()
        trace.close()
    assert diagnose(run_folder).findings == ()


def test_the_last_scale_is_that_of_the_last_change_whatever_moment_it_was_given(run_folder: Path) -> None:
    """Old rows of a long run share a later one's time, and a loop's calls of ``unscale_`` come after every change."""
    first = TraceBuilder(run_folder)
    first.scaler_event(ScalerAction.INIT, scale_before=None, scale_after=65536.0)
    for step, scale in ((3, 512.0), (2, 2048.0)):
        first.scaler_event(ScalerAction.SKIP, step=step, time=START + 50, scale_after=7.0)
        first.scaler_event(ScalerAction.BACKOFF, step=step, time=START + 50, scale_after=scale)
        first.scaler_event(ScalerAction.STATE_SAVED, step=step, time=START + 50, scale_after=None)
    for step in range(4, 104):
        first.scaler_event(ScalerAction.UNSCALE, step=step, time=START + 50 + step, scale_after=9.0)
    first.step(step=103)
    first.close()
    second = TraceBuilder(run_folder)
    second.scaler_event(ScalerAction.INIT, step=104, scaler=1, time=START + 1000, scale_after=65536.0)
    second.step()
    (finding,) = diagnose(second.close()).findings
    assert finding.cause is Cause.MISUSE_SCALER_STATE_NOT_RESTORED
    assert "where the run had come to 512" in finding.explanation


def test_a_restored_optimizer_with_a_fresh_scaler_matters_when_it_costs_steps(run_folder: Path) -> None:
    for number, skipped in enumerate((True, False)):
        trace = TraceBuilder(run_folder.with_name(str(number)))
        trace.step(skipped=skipped)
        trace.finding(Cause.MISUSE_SCALER_STATE_NOT_RESTORED, evidence='{"optimizer_steps": 500}')
        found = diagnose(trace.close()).findings
        assert [finding.cause for finding in found] == [Cause.MISUSE_SCALER_STATE_NOT_RESTORED] * skipped
        assert all("500 steps" in finding.explanation for finding in found)


# -- what capture saw -----------------------------------------------------------------------------------------------


#: Mistakes that spoil nothing, and only cost steps.
SEVERITIES = dict.fromkeys((Cause.MISUSE_SCALER_STATE_NOT_RESTORED, Cause.AMP_WITHOUT_EFFECT), Severity.WARNING)


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause.is_usage])
def test_a_mistake_that_capture_saw_is_told_with_its_line(run_folder: Path, cause: Cause) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    trace.finding(cause, line=42, evidence='{"learns": true}')
    diagnosis = diagnose(trace.close())
    (finding,) = diagnosis.findings
    if cause is Cause.MISUSE_SCHEDULER_ORDER:
        assert (finding.severity, diagnosis.verdict) == (Severity.INFO, Verdict.HEALTHY)
        return
    assert (finding.cause, finding.severity) == (cause, SEVERITIES.get(cause, Severity.ERROR))
    assert finding.source is not None
    assert finding.source.line == 42
    assert finding.explanation
    assert diagnosis.verdict is Verdict.PROBLEM
    assert diagnosis.primary == finding
    assert "train.py:42" in diagnosis.summary


def test_a_mistake_that_this_version_does_not_know_is_still_told(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.finding("misuse_of_next_year", evidence='{"why": "unheard of"}')
    (finding,) = diagnose(trace.close()).findings
    assert finding.cause is Cause.UNKNOWN
    assert "unheard of" in finding.explanation


@pytest.mark.parametrize(
    "cause", [Cause.NOTHING_TRAINS, Cause.HALF_PARAMS, Cause.RANKS_NOT_REDUCED, Cause.GRADIENTS_NOT_CLEARED]
)
@pytest.mark.parametrize(
    "evidence",
    [
        '{"cast": true}',
        '{"cast": true, "half": "many", "of": []}',
        '{"attempts": "x", "parameters": 3, "count": null, "ranks": {}}',
        '{"optimizer_steps": "x", "framework": 7}',
    ],
)
def test_evidence_that_is_damaged_leaves_the_mistake_itself(run_folder: Path, cause: Cause, evidence: str) -> None:
    trace = TraceBuilder(run_folder)
    trace.finding(cause, line=42, evidence=evidence)
    (finding,) = diagnose(trace.close()).findings
    assert finding.cause is cause
    assert finding.source is not None
    assert finding.source.line == 42
    assert finding.explanation


@pytest.mark.parametrize("form", [MistakeForm.LOSS_OF_SCALED_GRADIENTS, MistakeForm.UNSCALED_BY_HAND])
def test_a_scale_too_large_for_a_loss_of_scaled_gradients_is_cured_by_unscaling_them(
    run_folder: Path, form: MistakeForm
) -> None:
    trace = TraceBuilder(run_folder)
    for _ in range(30):
        trace.step(scale=1024.0, skipped=True)
    traced = Step(trace, step=0)
    forward = traced.op("mm", traced.entry())
    traced.loss(forward)
    traced.gradient(traced.backward("mm", traced.entry(), out=OVERFLOWN, of=forward, grad_fn="MmBackward0"))
    trace.incident(step=0, bad_params=("fc.weight",))
    trace.finding(Cause.MISUSE_NO_UNSCALE, form=form)
    (incident,) = (each for each in diagnose(trace.close()).incidents if each.cause is Cause.SCALE_OVERFLOW)
    advice = " ".join(each.text for each in incident.remedies)
    of_loss = form is MistakeForm.LOSS_OF_SCALED_GRADIENTS
    assert ("Unscale the gradients before they enter the loss" in advice) == of_loss
    assert ("loss is a sum" in advice) != of_loss
    assert ("computed from gradients that were not unscaled" in incident.explanation) == of_loss


def test_mistakes_are_told_in_order(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in (5, 2, 9):
        trace.finding(step=step)
    assert [finding.step for finding in diagnose(trace.close()).findings] == [2, 5, 9]
