"""What a loop carries from step to step: who wrote it is named, with the step at which that was."""

from __future__ import annotations

from pathlib import Path

import pytest

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.integration.planted_faults.carriers import BAD, CARRIERS, HARMLESS, READ, Carrier, train

#: The op that left the range of float16, and a part of its line.
WRITERS = {
    "queue": ("aten._to_copy.default", "keys.half()"),
    "bank": ("aten.copy_.default", "copy_("),
    "target": ("aten.mul_.Tensor", "mul_(1 + bad)"),
    "normaliser": ("aten.pow.Tensor_Scalar", "square().mean()"),
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


@pytest.mark.parametrize("kind", CARRIERS)
def test_the_same_loop_unpoisoned_is_healthy(kind: str, run_folder: Path) -> None:
    assert _diagnosed(CARRIERS[kind], run_folder, poisoned=False).verdict is Verdict.HEALTHY


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_a_loop_means_to_carry_is_no_failure(kind: str, run_folder: Path) -> None:
    told = _diagnosed(HARMLESS[kind], run_folder, poisoned=False)
    assert [each for each in told.incidents if each.severity is not Severity.INFO] == []
    assert told.verdict is Verdict.HEALTHY
