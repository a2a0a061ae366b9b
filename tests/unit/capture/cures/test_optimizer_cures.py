"""What would have kept an optimizer's step finite is tried on copies, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ampscope
from ampscope.analysis.results import Incident, Remedy
from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.cures.optimizer_cures import cures
from ampscope.capture.rerun.engine import RerunEngine
from ampscope.capture.rerun.optimizer_rerun import StepAgain
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.sites import Sites
from ampscope.trace.schema import Form, Trial
from ampscope.trace.vocabulary import Verdict
from tests.unit.capture.ruined_optimizers import Loop, Make, loop, primary


def proved(found: Incident) -> dict[str, bool]:
    return {each.kind: each.verified for each in found.remedies if each.verified is not None}


TINY = 2.0**-10
#: Of each loop, what was tried and whether it cures.
TRIED: dict[str, tuple[Loop, dict[str, bool]]] = {
    "an eps that float16 rounds away": (
        loop(lambda p: torch.optim.Adam(p, 1e-3), large=TINY, at=0, dtype=torch.float16),
        {Form.OPTIMIZER_EPS: True, Form.OPTIMIZER_IN_FLOAT32: True},
    ),
    "no eps": (loop(lambda p: torch.optim.Adam(p, 1e-3, eps=0.0), dead=True), {Form.OPTIMIZER_EPS: True}),
    "squares beyond float16": (
        loop(lambda p: torch.optim.Adam(p, 1e-3, eps=1e-4), large=60000.0, at=5, dtype=torch.float16),
        {Form.OPTIMIZER_IN_FLOAT32: True, Form.OPTIMIZER_CLIPPED: True},
    ),
    "squares beyond float32": (
        loop(lambda p: torch.optim.Adam(p, 1e-3), large=1e23),
        {Form.OPTIMIZER_CLIPPED: True},
    ),
}


@pytest.mark.parametrize("name", TRIED)
def test_what_keeps_the_step_finite_is_tried(name: str, run_folder: Path) -> None:
    run, expected = TRIED[name]
    found = primary(run, run_folder)
    assert proved(found) == expected
    assert found.remedies[0].verified
    assert not [each for each in found.remedies if each.kind in expected and each.verified is None]


def test_the_training_with_the_eps_that_was_proved_is_healthy(run_folder: Path) -> None:
    make: Make = lambda p: torch.optim.Adam(p, 1e-3)  # noqa: E731
    first: Remedy = primary(loop(make, large=TINY, at=0, dtype=torch.float16), run_folder / "bad").remedies[0]
    assert first.text == "Give Adam an eps of 0.0001: 1e-8 is zero in the dtype of its parameters."
    mended = loop(lambda p: torch.optim.Adam(p, 1e-3, eps=1e-4), large=TINY, at=0, dtype=torch.float16)
    scopes: list[ampscope.Scope] = []
    mended(lambda model: scopes.append(ampscope.watch(model, dir=run_folder / "good", quiet=True)))
    scopes[0].close()
    assert ampscope.diagnose(run_folder / "good").verdict is Verdict.HEALTHY


class _Attempt:
    """As much of an attempt as a step again needs."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.before = None


def stepped(dtype: torch.dtype, gradient: float, eps: float) -> tuple[nn.Linear, torch.optim.Adam]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=eps)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    return model, optimizer


def tried(model: nn.Linear, optimizer: torch.optim.Adam) -> dict[Form, Trial]:
    models = Models([model])
    again = StepAgain.of(_Attempt(optimizer), ["weight"], models)  # type: ignore[arg-type]
    assert again is not None
    engine = RerunEngine(models, Sites(0, models.module_type), ReplayBudget(1.0, 3), Guard("the test", pytest.fail))
    return {each.form.form: each.result.outcome for each in cures(again, engine) if each.form is not None}


def test_a_step_that_was_well_is_left_alone() -> None:
    assert tried(*stepped(torch.float16, 0.1, 1e-8)) == {}


def test_what_does_not_help_is_said_to_fail() -> None:
    """A learning rate that throws the weights out of float16 whatever the eps."""
    model, optimizer = stepped(torch.float16, 2.0**-14, 1e-8)
    optimizer.param_groups[0]["lr"] = 1e9
    assert tried(model, optimizer) == {Form.OPTIMIZER_EPS: Trial.NONFINITE, Form.OPTIMIZER_IN_FLOAT32: Trial.FINITE}


def test_copies_agree_with_the_optimizer_in_float32() -> None:
    """What the step on float32 copies gives is what an optimizer of float32 weights would have given."""
    model, optimizer = stepped(torch.float16, 2.0**-14, 1e-8)
    twin = nn.Linear(4, 4)
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs.nan_to_num(0.0, 0.0, 0.0))
    again = torch.optim.Adam(twin.parameters(), 1e-3)
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        kept = optimizer.state[theirs]
        again.state[mine] = {k: v.clone().float() for k, v in kept.items()}
        assert theirs.grad is not None
        mine.grad = theirs.grad.float()
    again.step()
    models = Models([model])
    step = StepAgain.of(_Attempt(optimizer), ["weight", "bias"], models)  # type: ignore[arg-type]
    assert step is not None
    copied = step.made(models, dtype=torch.float32)
    assert copied is not None
    assert torch.equal(copied.parameters["weight"], twin.weight)
