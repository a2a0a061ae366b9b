"""What a loop carries from step to step: who wrote it is named, with the step at which that was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ampscope
from ampscope.analysis.causes.catalogue import what_in_words
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.integration.planted_faults.carried.carriers import BAD, CARRIERS, HARMLESS, PRIORITIES, READ, Carrier, train

pytestmark = pytest.mark.usefixtures("device")

#: The op that left the range of float16, and a part of its line.
WRITERS = {
    "cache": ("aten._to_copy.default", ").half()"),
    "queue": ("aten._to_copy.default", "keys.half()"),
    "bank": ("aten.copy_.default", "copy_("),
    "target": ("aten.mul_.Tensor", "mul_(1 + bad)"),
    "teacher": ("aten.mul_.Tensor", "mul_(bad + 1)"),
    "normaliser": ("aten.pow.Tensor_Scalar", "square().mean()"),
    "documents": ("aten._to_copy.default", "row.half()"),
    "slots of documents": ("aten.copy_.default", "copy_("),
    "sums of epochs": ("aten.add_.Tensor", "+="),
    "hidden": ("aten._to_copy.default", ".half()"),
}


def _diagnosed(carrier: Carrier, folder: Path, *, poisoned: bool) -> Diagnosis:
    scopes = []
    train(
        carrier,
        lambda model, scaler: scopes.append(ampscope.watch(model, scaler, dir=folder, quiet=True)),
        poisoned=poisoned,
    )
    scopes[0].close()
    return ampscope.diagnose(folder)


@pytest.mark.parametrize("kind", CARRIERS)
def test_the_writer_of_poisoned_state_is_named(kind: str, run_folder: Path) -> None:
    told = _diagnosed(CARRIERS[kind], run_folder, poisoned=True)
    op, code = WRITERS[kind]
    first = told.primary
    assert isinstance(first, Incident)
    assert (first.cause, first.op, first.step, first.phase) == (Cause.FP16_OVERFLOW, op, BAD, "forward")
    assert first.source is not None
    assert code in first.source.code
    assert "skipped step does not undo" in first.explanation
    for later in (each for each in told.incidents if each is not first and each.severity is Severity.ERROR):
        assert later.step >= READ
        assert later.written_by is not None
        assert (later.written_by.step, later.written_by.op) == (BAD, op)
        assert "batch" not in " ".join(remedy.text for remedy in later.remedies)
        assert "batch" not in what_in_words(later)


@pytest.mark.parametrize("kind", CARRIERS)
def test_the_same_loop_unpoisoned_is_healthy(kind: str, run_folder: Path) -> None:
    assert _diagnosed(CARRIERS[kind], run_folder, poisoned=False).verdict is Verdict.HEALTHY


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_a_loop_means_to_carry_is_no_failure(kind: str, run_folder: Path) -> None:
    told = _diagnosed(HARMLESS[kind], run_folder, poisoned=False)
    assert [each for each in told.incidents if each.severity is not Severity.INFO] == []
    assert told.verdict is Verdict.HEALTHY


def test_a_zero_made_by_an_infinity_is_told_by_what_made_that(run_folder: Path) -> None:
    """Nothing that the loop carries turns bad: what it makes of that for the next step does, by way of x / inf = 0."""
    told = _diagnosed(PRIORITIES, run_folder, poisoned=True)
    first = told.primary
    assert isinstance(first, Incident)
    assert (first.cause, first.op, first.step) == (Cause.FP16_OVERFLOW, "aten.sum.default", BAD + 1)
    assert "The loop computes that before it calls the model, in the same step" in first.explanation
    assert all(each.cause is not Cause.BAD_INPUT for each in told.incidents)
    assert "batch" not in " ".join(remedy.text for remedy in first.remedies)


def test_of_two_writes_the_earlier_is_named(run_folder: Path) -> None:
    """Both sums of a ratio are infinite: the step that suffers would do so by the first alone."""
    sums = CARRIERS["sums of epochs"]

    def sum_up(state: dict[str, Any], out: Tensor, bad: bool) -> None:
        sums.after(state, out, bad or state["at"] == BAD + 3)

    first = _diagnosed(replace(sums, after=sum_up), run_folder, poisoned=True).primary
    assert isinstance(first, Incident)
    assert (first.cause, first.op, first.step) == (Cause.FP16_OVERFLOW, "aten.add_.Tensor", BAD)


def test_priorities_that_stay_small_are_healthy(run_folder: Path) -> None:
    assert _diagnosed(PRIORITIES, run_folder, poisoned=False).verdict is Verdict.HEALTHY


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_batch_that_came_with_it_stays_a_bad_batch(number: float, run_folder: Path) -> None:
    """Whoever writes an infinity of the code's own into a batch stands for the data; no op of the loop made it."""

    def spoil(state: dict[str, object], x: Tensor, bad: bool) -> None:
        state["weight"] = torch.ones(len(x)) * (number if bad else 1.0)

    carrier = Carrier(dict, lambda state, out, *_: (state["weight"] * out.mean(-1)).mean(), before=spoil)
    first = _diagnosed(carrier, run_folder, poisoned=True).primary
    assert isinstance(first, Incident)
    assert (first.cause, first.step, first.written_by) == (Cause.BAD_INPUT, BAD, None)
