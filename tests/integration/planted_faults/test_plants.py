"""Every fault planted in a transformer is named, by op, module and cause; a healthy training draws no alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ampscope.analysis.results import Incident
from ampscope.trace.vocabulary import Severity, Verdict
from tests.integration.planted_faults.conftest import CHANGES_GOOD, CURES, IS_DIFF, PLANTED
from tests.integration.planted_faults.models import ARCHITECTURES, Architecture
from tests.integration.planted_faults.table import BF16, FP16, PLANTS, Answer, Plant
from tests.integration.planted_faults.training import BAD_STEP, HEALTHY_STEPS, train_healthy, train_planted

#: Healthy trainings of the ordinary run, besides all plants, each in one of the models.
QUICK = {("gpt2-reentrant", FP16), ("vit", FP16), ("llama", BF16), ("mamba", BF16)}


def _case(*values: object, dtype: torch.dtype, quick: bool) -> object:
    name = "-".join([*map(str, values), str(dtype).removeprefix("torch.")])
    return pytest.param(*values, dtype, id=name, marks=() if quick else pytest.mark.plants_full)


def _planted() -> Iterator[object]:
    """Every plant in every model that it fits; one model each in the ordinary run, another for each plant."""
    for number, plant in enumerate(PLANTS):
        fitting = [where for where in ARCHITECTURES if plant.fits(where)]
        chosen = fitting[number % len(fitting)]
        for where in fitting:
            yield from (_case(plant, where, dtype=dtype, quick=where is chosen) for dtype in plant.dtypes)


def _healthy() -> Iterator[object]:
    for where in ARCHITECTURES:
        for dtype in (FP16, BF16):
            yield _case(where, dtype=dtype, quick=(where.name, dtype) in QUICK)


@pytest.mark.parametrize(("plant", "where", "dtype"), list(_planted()))
def test_a_plant_is_named(
    plant: Plant, where: Architecture, dtype: torch.dtype, run_folder: Path, record_property: Callable[[str, str], None]
) -> None:
    record_property(PLANTED, str(plant))
    diagnosis = train_planted(where, dtype, plant, run_folder)
    told = [incident for incident in diagnosis.incidents if incident.severity is not Severity.INFO]
    for remedy in told[0].remedies[:1] if told else ():
        known = {CURES: remedy.verified, IS_DIFF: remedy.diff, CHANGES_GOOD: remedy.changes_good_values}
        for name in [name for name, holds in known.items() if holds]:
            record_property(name, str(remedy.kind))
    assert [_said(incident) for incident in told] == [plant.answer(where), *plant.also(where)]
    assert {(incident.step, incident.last_step) for incident in told} == {(BAD_STEP, BAD_STEP)}
    assert diagnosis.primary == told[0]
    assert diagnosis.findings == ()


def _said(incident: Incident) -> Answer:
    return Answer(incident.cause, incident.op, incident.module, incident.phase, incident.replay)


@pytest.mark.parametrize(("where", "dtype"), list(_healthy()))
def test_a_healthy_training_draws_no_alarm(
    where: Architecture, dtype: torch.dtype, run_folder: Path, record_property: Callable[[str, str], None]
) -> None:
    record_property(PLANTED, "")
    diagnosis = train_healthy(where, dtype, run_folder)
    assert diagnosis.run.steps == HEALTHY_STEPS
    assert diagnosis.verdict is Verdict.HEALTHY
    assert [incident for incident in diagnosis.incidents if incident.severity is not Severity.INFO] == []
    assert diagnosis.findings == ()
