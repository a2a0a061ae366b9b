"""Spikes: a warning where the training did not get over one, a note where it did, silence where nobody can know."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ampscope import diagnose
from ampscope.analysis.diagnosis import around_spikes
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.schema import EventKind, Node, Phase, ReplayStatus, Source
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.support.trace_builder import TraceBuilder
from tests.support.traced_steps import NOTANUMBER, OVERFLOWN, Step

AT = 60
FEW_ROWS = {"rows": [5], "of": 32, "share": 0.97}
LOW = [0.1, 0.12, 0.09, 0.11] * 15
UP = [0.4, 0.5, 0.45, 0.42] * 10


def spike(
    trace: TraceBuilder,
    *,
    rows: dict[str, Any] | None = None,
    step: int = AT,
    out: str = "grad_norm",
    stepped: float | None = 5000.0,
) -> None:
    """What capture takes down of a spike."""
    far = {"value": 5000.0, "usual": 1.0, "highest": 2.0, "steps": 60}
    said = {"optimizer": 0, "out": {out: far}, "parameters": [["head.weight", 0.9]], "rows": rows, "inputs": {}}
    replayed = {"stepped": stepped, "replay": ReplayStatus.EXACT, "replay_reason": ""}
    trace.event(EventKind.SPIKE, json.dumps({**said, **replayed}), step=step)


def told(
    folder: Path,
    losses: Sequence[float],
    *,
    rates: Sequence[float] = (),
    rows: dict[str, Any] | None = None,
    out: str = "grad_norm",
    optimizers: int = 1,
    stepped: float | None = 5000.0,
    norms: Sequence[float] = (),
) -> Diagnosis:
    """The diagnosis of a run with a spike at `AT`."""
    trace = TraceBuilder(folder)
    for step, loss in enumerate(losses):
        for optimizer in range(optimizers):
            norm = norms[step] if norms else 1.0
            rate = rates[step] if rates else 1e-3
            trace.step(step=step, optimizer=optimizer, loss=loss, scale=None, lr=rate, grad_norm=norm)
    spike(trace, rows=rows, out=out, stepped=stepped)
    return diagnose(trace.close())


def of_spikes(diagnosis: Diagnosis) -> list[Incident]:
    return [each for each in diagnosis.incidents if each.cause is Cause.SPIKE]


@pytest.mark.parametrize(
    ("losses", "rows"),
    [
        pytest.param([*LOW, 0.11, *UP], None, id="the loss was usual until the gradients were taken"),
        pytest.param([*LOW, 900.0, *UP], FEW_ROWS, id="a few rows, alone in their loss"),
    ],
)
def test_a_spike_that_training_did_not_get_over_is_a_warning(
    losses: list[float], rows: dict[str, Any] | None, run_folder: Path
) -> None:
    diagnosis = told(run_folder, losses, rows=rows)
    (found,) = of_spikes(diagnosis)
    assert diagnosis.primary == found
    assert diagnosis.verdict is Verdict.PROBLEM
    assert (found.severity, found.step, found.module) == (Severity.WARNING, AT, "head")
    assert "5,000 times its usual 1 (at most 2 in the 60 good steps before)" in found.explanation
    assert "The loss stayed up: 0.45 in the steps after it, 0.105 in those before." in found.explanation
    assert ("97% of the gradient is that of the row at index 5, of 32 rows" in found.explanation) == (rows is not None)
    assert "clip_grad_norm_" in found.remedies[-1].code
    assert diagnosis.summary.startswith(f"Step {AT} stood far out.")


@pytest.mark.parametrize(
    ("losses", "options"),
    [
        pytest.param([*LOW, 900.0, *LOW], {"rows": FEW_ROWS}, id="got over it"),
        pytest.param([*LOW, 900.0, *[0.1 + 5 * 0.9**step for step in range(60)]], {"rows": FEW_ROWS}, id="in the end"),
    ],
)
@pytest.mark.parametrize("at_once", [3, 1 << 16])
def test_a_spike_that_training_got_over_is_a_note(
    losses: list[float], options: dict[str, Any], at_once: int, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(around_spikes, "_AT_ONCE", at_once)
    diagnosis = told(run_folder, losses, **options)
    assert (diagnosis.verdict, diagnosis.primary) == (Verdict.HEALTHY, None)
    (found,) = of_spikes(diagnosis)
    assert found.severity is Severity.INFO
    assert found.explanation.endswith("The training got over it.")
    assert found.remedies == ()


@pytest.mark.parametrize(
    ("losses", "options"),
    [
        pytest.param([*LOW, *[50.0] * 40], {}, id="harder batches from now on"),
        pytest.param([*LOW, *[50.0] * 40], {"rows": FEW_ROWS}, id="such batches, uneven ones"),
        pytest.param([*LOW, 50.0, *UP], {}, id="another task: many rows, and the first step helps most"),
        pytest.param([*LOW, 0.11, *UP], {"rates": [*[1e-3] * 58, *[1e-2] * 43]}, id="the learning rate was raised"),
        pytest.param([*LOW, 0.11, *UP[:15]], {}, id="too early to tell"),
        pytest.param([*LOW, 900.0, *LOW[:15]], {"rows": FEW_ROWS, "stepped": 1.0}, id="too early, and clipped"),
        pytest.param([*LOW, 900.0, *LOW[:15]], {"rows": FEW_ROWS, "stepped": None}, id="too early, and not looked at"),
        pytest.param([*LOW, 900.0, *LOW[:15]], {"rows": FEW_ROWS, "stepped": 150.0}, id="too early, and not enormous"),
        pytest.param([-each for each in [*LOW, 0.11, *UP]], {}, id="losses with a sign"),
        pytest.param([*LOW, 0.11, *UP], {"optimizers": 2}, id="two that play against each other"),
        pytest.param([*LOW, 0.3, *UP], {"out": "loss"}, id="the loss alone, and not alone for long"),
        pytest.param([0.4, *LOW[1:], 0.11, *[0.14, 0.2] * 20], {}, id="hardly more than before"),
    ],
)
def test_where_nobody_can_know_nothing_is_said(losses: list[float], options: dict[str, Any], run_folder: Path) -> None:
    diagnosis = told(run_folder, losses, **options)
    assert (diagnosis.verdict, diagnosis.primary, of_spikes(diagnosis)) == (Verdict.HEALTHY, None, [])


CALM = [1.0, 2.0, 0.5] * 20
FALLING = [0.1 * 0.97**step for step in range(60)]


@pytest.mark.parametrize(
    ("losses", "norms", "count"),
    [
        pytest.param([*LOW, *LOW], [*CALM, *[5000.0] * 60], 60, id="the loss as it was"),
        pytest.param([*LOW, *[2 * each for each in LOW]], [*CALM, *[5000.0] * 60], 60, id="the loss has risen"),
        pytest.param([*LOW, *LOW], [*CALM, *[5000.0, 1.0, 2.0] * 20], 20, id="each third step"),
        pytest.param([*LOW, 0.3, *LOW], [*CALM, *[5000.0] * 61], 61, id="a loss that rose by far less"),
    ],
)
def test_a_gradient_norm_that_does_not_come_back_is_a_warning(
    losses: list[float], norms: list[float], count: int, run_folder: Path
) -> None:
    diagnosis = told(run_folder, losses, norms=norms)
    (found,) = of_spikes(diagnosis)
    assert (diagnosis.verdict, diagnosis.primary, found.severity) == (Verdict.PROBLEM, found, Severity.WARNING)
    assert (found.step, found.last_step, found.count, found.lasting) == (AT, len(losses) - 1, count, True)
    assert diagnosis.summary.startswith(f"Step {AT} began a lasting jump of the gradient norm.")
    assert (
        "the norm is more than 10 times the largest before, and in the middle of them 2,500 times" in found.explanation
    )
    assert f"step {AT} on" in found.remedies[0].text
    assert "got over" not in found.explanation


@pytest.mark.parametrize(
    ("losses", "options"),
    [
        pytest.param([*LOW, *FALLING], {}, id="the loss goes on falling"),
        pytest.param([*LOW, *[5000 * each for each in LOW]], {}, id="the loss is weighted otherwise"),
        pytest.param([*LOW, *[40 * each for each in FALLING]], {}, id="so it is, and falls"),
        pytest.param([*LOW, *LOW], {"rates": [*[1e-3] * 58, *[1e-2] * 62]}, id="the learning rate was raised"),
        pytest.param([-each for each in [*LOW, *LOW]], {}, id="losses with a sign"),
        pytest.param([*LOW, *LOW], {"optimizers": 2}, id="two that play against each other"),
    ],
)
def test_one_that_something_accounts_for_is_a_note(
    losses: list[float], options: dict[str, Any], run_folder: Path
) -> None:
    diagnosis = told(run_folder, losses, norms=[*CALM, *[5000.0] * 60], **options)
    (found,) = of_spikes(diagnosis)
    assert (diagnosis.verdict, diagnosis.primary, found.severity) == (Verdict.HEALTHY, None, Severity.INFO)
    assert (found.lasting, found.remedies) == (True, ())
    assert diagnosis.summary.endswith(f" From step {AT} on the gradient norm is far larger.")
    assert "got over" not in found.explanation


@pytest.mark.parametrize(
    ("norms", "said"),
    [
        pytest.param([5000.0, *CALM], "to 1. The training got over it.", id="it comes back"),
        pytest.param([5000.0, *[100 * 0.8**step + 1 for step in range(60)]], "got over it.", id="in the end"),
        pytest.param([5000.0, *CALM[:30], *[1.1**step for step in range(30)]], "got over it.", id="and grows slowly"),
        pytest.param([5000.0, *[8.0] * 60], "norm, at most 2 before, is 8 in the latest steps.", id="in part"),
    ],
)
def test_a_norm_that_comes_back_is_told_as_far_as_it_did(norms: list[float], said: str, run_folder: Path) -> None:
    diagnosis = told(run_folder, [*LOW, 0.11, *LOW], norms=[*CALM, *norms])
    (found,) = of_spikes(diagnosis)
    assert (diagnosis.verdict, found.severity, found.lasting) == (Verdict.HEALTHY, Severity.INFO, False)
    assert diagnosis.summary.startswith(f"No numerical fault in {len(norms) + 60} steps; checked: ")
    assert found.explanation.endswith(said)
    assert "The loss came back to 0.1" in found.explanation


def test_of_a_norm_that_has_jumped_just_now_nothing_is_said(run_folder: Path) -> None:
    diagnosis = told(run_folder, [*LOW, *LOW[:20]], norms=[*CALM, *[5000.0] * 20])
    assert (diagnosis.verdict, of_spikes(diagnosis)) == (Verdict.HEALTHY, [])


@pytest.mark.parametrize(("after", "said"), [(15, "15 steps follow, too few"), (1, "One step follows, too few")])
def test_enormous_gradients_of_few_rows_are_told_though_the_run_ends_soon(
    after: int, said: str, run_folder: Path
) -> None:
    diagnosis = told(run_folder, [*LOW, 900.0, *LOW[:after]], rows=FEW_ROWS)
    (found,) = of_spikes(diagnosis)
    assert (diagnosis.verdict, diagnosis.primary) == (Verdict.PROBLEM, found)
    assert found.explanation.endswith(f"{said} to tell whether the training gets over it.")


def test_what_changed_since_the_step_before_and_a_good_one_is_told(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step, loss in enumerate([*LOW, 900.0, *LOW]):
        trace.step(loss=loss, scale=64.0 if step < AT else 1024.0, lr=2e-3 if step < AT else 1e-3)
    for step, source, dtype, rows in ((0, Source.LIVE, "bfloat16", 32), (AT, Source.REPLAY, "float16", 4)):
        traced = Step(trace, step=step, source=source)
        x = traced.entry(out=(-1.0, 1.0), name="args[0]", shape=f"{rows}x8", dtype="float32")
        cast = traced.op("_to_copy", x, out=(-1.0, 1.0), dtype=dtype, line=7)
        traced.op("mm", cast, out=(-1.0, 1.0), dtype=dtype, module="head", line=7)
    spike(trace, rows=FEW_ROWS)
    (found,) = of_spikes(diagnose(trace.close()))
    assert (
        "Otherwise than before: the learning rate (0.002, now 0.001), the loss scale (64, now 1,024), the rows of the "
        "batch (32, now 4), the dtype of mm in head (bfloat16, now float16)."
    ) in found.explanation


def test_what_did_not_change_is_not_told(run_folder: Path) -> None:
    (found,) = of_spikes(told(run_folder, [*LOW, 900.0, *UP], rows=FEW_ROWS))
    assert "Otherwise" not in found.explanation


def test_a_run_that_blew_up_is_told_from_the_step_that_threw_it_off(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    losses = [*LOW, 900.0, 1e6, 1e12, math.nan]
    for loss in losses:
        trace.step(loss=loss, scale=None)
    end = len(losses) - 1
    traced = Step(trace, step=end)
    product = traced.op("mm", traced.entry(out=(-1e30, 1e30)), out=OVERFLOWN, dtype="float32")
    traced.loss(traced.op("mean", product, out=NOTANUMBER, phase=Phase.LOSS, dtype="float32"))
    trace.incident(step=end, trigger="nonfinite_loss", loss=math.nan, scale=None)
    spike(trace, rows=FEW_ROWS)
    spike(trace, step=AT + 1)
    diagnosis = diagnose(trace.close())
    (found,) = of_spikes(diagnosis)
    assert (found.severity, found.step) == (Severity.WARNING, AT)
    assert f"step {end} was not finite any more" in found.explanation
    assert isinstance(diagnosis.primary, Incident)
    assert (diagnosis.primary.cause, diagnosis.primary.step) == (Cause.DIVERGENCE, end)
    assert f"It began at step {AT}." in diagnosis.primary.explanation
    assert diagnosis.primary.remedies[0].text.startswith("Look at these rows")


def test_what_came_in_larger_is_named(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for loss in [*LOW, 900.0, *UP]:
        trace.step(loss=loss, scale=None)
    for step, source, size in ((0, Source.LIVE, 3.0), (AT, Source.REPLAY, 3000.0)):
        traced = Step(trace, step=step, source=source)
        x = traced.entry(out=(-size, 1.0), name="args[0]")
        traced.op("mm", x, out=(-size, size), module="first", line=7)
    spike(trace)
    (found,) = of_spikes(diagnose(trace.close()))
    assert (found.op, found.module, found.severity) == (Node.INPUT, "first", Severity.WARNING)
    assert "The input args[0] reached 3,000; in step 0 it reached 3." in found.explanation


def test_an_op_whose_operands_did_not_rise_is_named(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for loss in [*LOW, 0.11, *UP]:
        trace.step(loss=loss, scale=None)
    for step, source, size in ((0, Source.LIVE, 3.0), (AT, Source.REPLAY, 3000.0)):
        traced = Step(trace, step=step, source=source)
        first = traced.op("mm", traced.entry(out=(-2.0, 2.0)), out=(-2.0, 2.0), module="first", line=7)
        inverse = traced.op("reciprocal", first, out=(-size, size), module="second", line=8)
        traced.op("mm", inverse, out=(-size, size), module="third", line=9)
    spike(trace)
    (found,) = of_spikes(diagnose(trace.close()))
    assert (found.op, found.module) == ("aten.reciprocal.default", "second")
    assert "The result of reciprocal in second reached 3,000; in step 0 it reached 3." in found.explanation


@pytest.mark.parametrize("text", ["", "{}", '{"optimizer": 0, "out": 5}', '{"optimizer": 0, "out": {"loss": {}}}'])
def test_a_damaged_spike_is_passed_over(text: str, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for loss in [*LOW, 0.11, *UP]:
        trace.step(loss=loss)
    trace.event(EventKind.SPIKE, text, step=AT)
    assert diagnose(trace.close()).verdict is Verdict.HEALTHY
