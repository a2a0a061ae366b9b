"""What a model carries from step to step, and turns bad in a step, is judged when it has reached the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.schema import Table, Trigger
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.integration.planted_faults.carried import holders
from tests.integration.planted_faults.carried.holders import BAD, HARMLESS, HOLDERS, Holder, Mean
from tests.support.training.accelerator import fake_device
from tests.support.training.accelerator.fake_device import TYPE

pytestmark = pytest.mark.accelerator


def diagnosed(kind: type[Holder], folder: Path, *, poisoned: bool, fused: bool) -> Diagnosis:
    """Nothing is done on the device before somebody waits for it."""
    scopes: list[ampscope.Scope] = []

    def watch(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=folder, quiet=True))

    with fake_device.latency(fake_device.NEVER):
        holders.train(kind, watch, poisoned=poisoned, device=TYPE, fused=fused)
        scopes[0].close()
    return ampscope.diagnose(folder)


@pytest.mark.parametrize("kind", HOLDERS)
def test_the_writer_is_named(kind: type[Holder], run_folder: Path) -> None:
    first = diagnosed(kind, run_folder, poisoned=True, fused=False).primary
    assert isinstance(first, Incident)
    assert (first.cause, first.op, first.step) == (Cause.FP16_OVERFLOW, "aten.mul.Tensor", BAD)


@pytest.mark.parametrize("kind", HOLDERS)
def test_with_a_fused_optimizer_the_step_is_named(kind: type[Holder], run_folder: Path) -> None:
    """The weights have moved by then, so that it is not run again; but what it left is known where it is read."""
    told = diagnosed(kind, run_folder, poisoned=True, fused=True)
    left, *_ = ampscope.open_run(run_folder).rows(Table.INCIDENTS)
    assert (left.step, left.trigger) == (BAD, Trigger.NONFINITE_CARRIED)
    assert "after the optimizer had moved the weights" in left.replay_reason
    reader = told.primary
    assert isinstance(reader, Incident)
    assert reader.step > BAD
    assert reader.written_by is not None
    assert reader.written_by.step == BAD
    assert "batch" not in " ".join(remedy.text for remedy in reader.remedies)


def test_what_vanishes_in_the_next_step_is_told_all_the_same(run_folder: Path) -> None:
    """Over an infinity a number is zero: neither loss nor gradients show what the step before has left."""
    diagnosed(Mean, run_folder, poisoned=True, fused=True)
    found = ampscope.open_run(run_folder).rows(Table.INCIDENTS)
    assert [(row.step, row.trigger) for row in found] == [
        (BAD, Trigger.NONFINITE_CARRIED),
        (BAD + 1, Trigger.CARRIED_READ),
    ]


@pytest.mark.parametrize("kind", [*HOLDERS, *HARMLESS])
def test_the_same_model_unpoisoned_is_healthy(kind: type[Holder], run_folder: Path) -> None:
    told = diagnosed(kind, run_folder, poisoned=False, fused=True)
    assert [each for each in told.incidents if each.severity is not Severity.INFO] == []
    assert told.verdict is Verdict.HEALTHY
