"""Faults in what outlives a step are named where they were planted; the same with numbers that fit draws no alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ampscope
from ampscope.analysis.results import Diagnosis
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.integration.planted_faults.conftest import PLANTED
from tests.integration.planted_faults.models import ARCHITECTURES, Architecture
from tests.integration.planted_faults.state import state_faults as faults

#: The step that something happens in, which is none of those whose state is looked at anyway; and how many there are.
PLANTED_AT, STEPS = 5, 8
#: The step in which a poisoned buffer is read.
READ_AT = 7

Model = Any
Optimizer = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlant:
    """Something that happens to the state of a training, and what is to be said of it."""

    name: str
    cause: Cause | None = None  #: None for a harmless twin
    op: str = ""
    phase: str = "forward"
    module: Callable[[Architecture], str] = lambda where: where.norm
    step: int = PLANTED_AT
    optimizer: Callable[..., Optimizer] = lambda p: torch.optim.AdamW(p, 1e-3)
    insert: Callable[[torch.nn.Module], torch.nn.Module] | None = None  #: takes the second layer's norm's place
    before: Callable[[Model, Optimizer, Architecture, int], object] = lambda *_: None
    unstepped: Callable[[Model, Optimizer, Architecture, int], object] = lambda *_: None  #: between backward and step

    def __str__(self) -> str:
        return self.name


def _up(model: Model, where: Architecture) -> Any:
    return model.get_submodule(where.up).weight


def _spoil_moment(value: float) -> Callable[..., object]:
    def spoil(model: Model, optimizer: Optimizer, where: Architecture, step: int) -> None:
        if step == PLANTED_AT:
            optimizer.state[_up(model, where)]["exp_avg_sq"][0, 0] = value

    return spoil


def _large_gradient(size: float) -> Callable[..., object]:
    def enlarge(model: Model, optimizer: Optimizer, where: Architecture, step: int) -> None:
        if step == PLANTED_AT:
            _up(model, where).grad[0, 0] = size

    return enlarge


def _silent_row(eps: float) -> Callable[..., object]:
    """The MLP has a group of its own; one row of its gradient is zero, of the step that is planted in."""

    def silence(model: Model, optimizer: Optimizer, where: Architecture, step: int) -> None:
        weight, group = _up(model, where), optimizer.param_groups[0]
        if not step:
            group["params"] = [each for each in group["params"] if each is not weight]
            optimizer.add_param_group({"params": [weight], "eps": eps})
        if step == PLANTED_AT:
            weight.grad[0] = 0.0

    return silence


def _loud_once(loudness: float) -> Callable[..., object]:
    def play(model: Model, optimizer: Optimizer, where: Architecture, step: int) -> None:
        averages = model.get_submodule(where.norm)
        averages.loudness = loudness if step == PLANTED_AT else 1.0
        averages.reads = step == READ_AT

    return play


PLANTS = (
    StatePlant(
        name="second moment poisoned by hand",
        cause=Cause.BAD_OPTIMIZER_STATE,
        phase="optimizer",
        module=lambda where: where.up,
        step=STEPS - 1,  # when it was seen
        before=_spoil_moment(torch.inf),
    ),
    StatePlant(name="second moment enlarged by hand", before=_spoil_moment(1e30)),
    StatePlant(
        name="second moment overflows",
        cause=Cause.BAD_OPTIMIZER_STATE,
        op="aten.addcmul_.default",
        phase="optimizer",
        module=lambda where: where.up,
        unstepped=_large_gradient(1e23),
    ),
    StatePlant(name="second moment large", unstepped=_large_gradient(1e15)),
    StatePlant(
        name="half moment overflows",
        cause=Cause.BAD_OPTIMIZER_STATE,
        op="aten._to_copy.default",
        phase="optimizer",
        module=lambda where: where.up,
        optimizer=faults.HalfMoments,
        unstepped=_large_gradient(1e4),
    ),
    StatePlant(
        name="moment in float32 does not",
        optimizer=lambda p: faults.HalfMoments(p, dtype=torch.float32),
        unstepped=_large_gradient(1e4),
    ),
    StatePlant(
        name="optimizer divides zero by zero",
        cause=Cause.DIV_ZERO,
        op="aten.div.Tensor",
        phase="optimizer",
        module=lambda where: where.up,
        optimizer=faults.Normalised,
        unstepped=_silent_row(0.0),
    ),
    StatePlant(name="optimizer divides zero by eps", optimizer=faults.Normalised, unstepped=_silent_row(1e-8)),
    StatePlant(
        name="statistic overflows, and is read later",
        cause=Cause.FP16_OVERFLOW,
        op="aten._to_copy.default",
        insert=faults.averages(torch.float16),
        before=_loud_once(1e3),
    ),
    StatePlant(name="statistic in float32 does not", insert=faults.averages(torch.float32), before=_loud_once(1e3)),
    StatePlant(
        name="statistic rounded away",
        cause=Cause.BF16_PRECISION,
        op="aten.add_.Tensor",
        step=0,
        insert=faults.averages(torch.bfloat16, momentum=0.001, start=8.0),
    ),
    StatePlant(name="statistic that moves", insert=faults.averages(torch.bfloat16, momentum=0.1, start=8.0)),
    StatePlant(name="slow statistic in float32", insert=faults.averages(torch.float32, momentum=0.001, start=8.0)),
)


def train(where: Architecture, plant: StatePlant, folder: Path) -> Diagnosis:
    """Trains in bfloat16, without a scaler."""
    torch.manual_seed(0)
    model: Any = where.build().train()
    if plant.insert is not None:
        model.set_submodule(where.norm, plant.insert(model.get_submodule(where.norm)))
    optimizer = plant.optimizer(model.parameters())
    with ampscope.watch(model, dir=folder, quiet=True):
        for step in range(STEPS):
            plant.before(model, optimizer, where, step)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**where.batch()).loss
            loss.backward()
            plant.unstepped(model, optimizer, where, step)
            optimizer.step()
            if not torch.isfinite(loss):
                break
    return ampscope.diagnose(folder)


def _cases() -> Iterator[object]:
    """Every plant in every model; one model each in the ordinary run, another for each plant."""
    for number, plant in enumerate(PLANTS):
        for place, where in enumerate(ARCHITECTURES):
            quick = place == number % len(ARCHITECTURES)
            marks = () if quick else pytest.mark.plants_full
            yield pytest.param(plant, where, id=f"{plant}-{where}", marks=marks)


@pytest.mark.parametrize(("plant", "where"), list(_cases()))
def test_a_plant_in_the_state_is_named_and_its_twin_is_not(
    plant: StatePlant, where: Architecture, run_folder: Path, record_property: Callable[[str, str], None]
) -> None:
    record_property(PLANTED, str(plant) if plant.cause else "")
    diagnosis = train(where, plant, run_folder)
    told = [incident for incident in diagnosis.incidents if incident.severity is not Severity.INFO]
    said = [(each.cause, each.op, each.module, each.phase, each.step) for each in told]
    if plant.cause is None:
        assert (said, diagnosis.findings, diagnosis.verdict) == ([], (), Verdict.HEALTHY)
        return
    assert said[:1] == [(plant.cause, plant.op, plant.module(where), plant.phase, plant.step)]
    assert diagnosis.primary == told[0]
    assert diagnosis.findings == ()
