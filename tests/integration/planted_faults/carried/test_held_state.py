"""What a model keeps in a plain attribute from step to step: who wrote it is named, and no batch is blamed."""

from __future__ import annotations

from pathlib import Path

import pytest

import ampscope
from ampscope.analysis.causes.catalogue import what_in_words
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.integration.planted_faults.carried.holders import BAD, HARMLESS, HOLDERS, STEPS, Holder, Shown, train


def _diagnosed(kind: type[Holder], folder: Path, *, poisoned: bool, loss_fails_at: int = -1) -> Diagnosis:
    scopes = []
    train(
        kind,
        lambda model, scaler: scopes.append(ampscope.watch(model, scaler, dir=folder, quiet=True)),
        poisoned=poisoned,
        loss_fails_at=loss_fails_at,
    )
    scopes[0].close()
    return ampscope.diagnose(folder)


@pytest.mark.parametrize("kind", HOLDERS)
def test_the_writer_of_a_poisoned_attribute_is_named(kind: type[Holder], run_folder: Path) -> None:
    told = _diagnosed(kind, run_folder, poisoned=True)
    first = told.primary
    assert isinstance(first, Incident), told.summary
    assert (first.cause, first.op, first.step) == (Cause.FP16_OVERFLOW, "aten.mul.Tensor", BAD)
    assert (first.module, first.phase) == ("holder", "forward")
    assert first.source is not None
    assert "half * half" in first.source.code
    later = [each for each in told.incidents if each is not first and each.severity is Severity.ERROR]
    assert later
    for each in later:
        assert each.written_by is not None
        assert (each.written_by.step, each.written_by.op) == (BAD, first.op)
        assert "batch" not in " ".join(remedy.text for remedy in each.remedies)
        assert "batch" not in what_in_words(each)


@pytest.mark.parametrize("kind", [*HOLDERS, *HARMLESS])
def test_the_same_model_unpoisoned_is_healthy(kind: type[Holder], run_folder: Path) -> None:
    told = _diagnosed(kind, run_folder, poisoned=False)
    assert [each for each in told.incidents if each.severity is not Severity.INFO] == []
    assert told.verdict is Verdict.HEALTHY, told.summary


def test_an_infinity_that_nobody_reads_is_no_failure(run_folder: Path) -> None:
    assert _diagnosed(Shown, run_folder, poisoned=True).verdict is Verdict.HEALTHY


def test_an_infinity_that_nobody_reads_is_not_blamed_for_a_later_failure(run_folder: Path) -> None:
    told = _diagnosed(Shown, run_folder, poisoned=True, loss_fails_at=STEPS - 2)
    assert [(each.cause, each.step) for each in told.incidents] == [(Cause.LOG_ZERO, STEPS - 2)]
