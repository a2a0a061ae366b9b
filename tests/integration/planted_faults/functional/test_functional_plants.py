"""Faults in trainings that call their model through torch.func or never call backward; each with its harmless twin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.schema import ReplayStatus
from ampscope.trace.vocabulary import Cause, Severity, Verdict
from tests.integration.planted_faults.functional import loops
from tests.integration.planted_faults.functional.kept_weights import KEPT, Step
from tests.integration.planted_faults.functional.loops import ASSIGNED, UPDATES, WITH_BACKWARD, Net, Way

STEPS, BAD_STEP = 6, 3


class Fault(NamedTuple):
    """What the part in the middle computes, and the value of the input at which that goes wrong."""

    part: Callable[[Tensor], Tensor]
    bad: float
    cause: Cause
    op: str
    phase: str = "forward"


FAULTS = {
    "log": Fault(lambda h: h.clamp_min(0).log(), 0.0, Cause.LOG_ZERO, "aten.log.default"),
    "division": Fault(lambda h: h / h.abs(), 0.0, Cause.DIV_ZERO, "aten.div.Tensor"),
    "root": Fault(lambda h: (h - 0.25).sqrt(), -1.0, Cause.SQRT_NEGATIVE, "aten.sqrt.default"),
    "slope of a root": Fault(lambda h: h.clamp_min(0).sqrt(), 0.0, Cause.SQRT_GRAD_ZERO, "aten.div.Tensor"),
    "overflow": Fault(lambda h: h.half().square().float(), 300.0, Cause.FP16_OVERFLOW, "aten.pow.Tensor_Scalar"),
    "batch": Fault(lambda h: h.tanh(), math.nan, Cause.BAD_INPUT, "input"),
}
#: Faults of the ordinary run for each way; all of them with ``make plants``.
_NAMES = list(FAULTS)


def _trained(way: Way, fault: Fault, folder: Path, *, bad: bool, optimizes: bool) -> Diagnosis:
    torch.manual_seed(0)
    model = Net(fault.part)
    optimizer = torch.optim.SGD(model.parameters(), lr=loops.RATE)
    if not optimizes:
        del optimizer
    with ampscope.watch(model, dir=folder, quiet=True):
        for step in range(STEPS if not bad else BAD_STEP + 1):
            x, y = loops.batch()
            if bad and step == BAD_STEP:
                x[1] = fault.bad
            way(model, optimizer if optimizes else None, (x, y))  # type: ignore[arg-type]  # not used there
    return ampscope.diagnose(folder)


def _cases() -> Iterator[object]:
    ways = [*((way, True) for way in (*WITH_BACKWARD, *ASSIGNED)), *((way, False) for way in UPDATES)]
    for number, (way, optimizes) in enumerate(ways):
        for place, name in enumerate(_NAMES):
            quick = place == number % len(_NAMES)
            marks = () if quick else pytest.mark.plants_full
            yield pytest.param(way, name, optimizes, id=f"{way.__name__}-{name}", marks=marks)


@pytest.mark.parametrize(("way", "name", "optimizes"), list(_cases()))
def test_a_fault_is_named(way: Way, name: str, optimizes: bool, run_folder: Path) -> None:
    fault = FAULTS[name]
    found = _trained(way, fault, run_folder, bad=True, optimizes=optimizes)
    primary = found.primary
    assert primary is not None
    assert isinstance(primary, Incident)
    module = "body" if fault.op == "input" else "part"
    assert (primary.cause, primary.op, primary.module, primary.step) == (fault.cause, fault.op, module, BAD_STEP)
    assert primary.replay == ReplayStatus.EXACT
    assert found.run.steps == BAD_STEP + 1


@pytest.mark.parametrize(("way", "name", "optimizes"), list(_cases()))
def test_its_twin_is_healthy(way: Way, name: str, optimizes: bool, run_folder: Path) -> None:
    found = _trained(way, FAULTS[name], run_folder, bad=False, optimizes=optimizes)
    assert [incident for incident in found.incidents if incident.severity is not Severity.INFO] == []
    assert (found.verdict, found.run.steps) == (Verdict.HEALTHY, STEPS)


# -- weights that the loop keeps by itself --------------------------------------------------------------------------


def _trained_keeping(way: Callable[[nn.Module], Step], fault: Fault, folder: Path, *, bad: bool) -> Diagnosis:
    torch.manual_seed(0)
    model = Net(fault.part)
    step_with = way(model)
    with ampscope.watch(model, dir=folder, quiet=True):
        for step in range(STEPS if not bad else BAD_STEP + 1):
            x, y = loops.batch()
            if bad and step == BAD_STEP:
                x[1] = fault.bad
            step_with((x, y))
    return ampscope.diagnose(folder)


def _keeping() -> Iterator[object]:
    for number, way in enumerate(KEPT):
        for place, name in enumerate(_NAMES):
            marks = () if place == number % len(_NAMES) else pytest.mark.plants_full
            yield pytest.param(way, name, id=f"{way.__name__}-{name}", marks=marks)


@pytest.mark.parametrize(("way", "name"), list(_keeping()))
def test_a_fault_is_named_where_the_loop_keeps_the_weights(
    way: Callable[[nn.Module], Step], name: str, run_folder: Path
) -> None:
    fault = FAULTS[name]
    found = _trained_keeping(way, fault, run_folder, bad=True)
    primary = found.primary
    assert isinstance(primary, Incident)
    module = "body" if fault.op == "input" else "part"
    assert (primary.cause, primary.op, primary.module, primary.step) == (fault.cause, fault.op, module, BAD_STEP)
    assert primary.replay == ReplayStatus.EXACT
    assert found.run.steps == BAD_STEP + 1


@pytest.mark.parametrize("way", KEPT)
def test_a_loop_that_keeps_the_weights_is_healthy_and_its_steps_are_counted(
    way: Callable[[nn.Module], Step], run_folder: Path
) -> None:
    found = _trained_keeping(way, FAULTS["log"], run_folder, bad=False)
    assert [incident for incident in found.incidents if incident.severity is not Severity.INFO] == []
    assert (found.verdict, found.run.steps) == (Verdict.HEALTHY, STEPS)
