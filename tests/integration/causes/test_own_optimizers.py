"""What an optimizer of the user's own makes inf or NaN of finite gradients is told in that step, at its op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.vocabulary import Cause, Verdict

STEPS, EVERY, BAD = 9, 3, 6


class Refreshed(torch.optim.Optimizer):
    """Takes a root of what it keeps of its gradients, now and then; from one step on that is below zero."""

    def __init__(self, parameters: Any, *, least: float | None) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.least, self.dtype, self.steps = least, torch.float32, 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure here
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["kept"] = [torch.zeros_like(p), torch.zeros(())]  # in a list, written in place
                    state["scale"] = (torch.ones_like(p),)
                mean, count = state["kept"]
                count.add_(1)
                mean.mul_(0.5).add_(p.grad.abs() if self.steps < BAD else -p.grad.abs() - mean, alpha=0.5)
                if self.steps % EVERY == 0:
                    mean = mean if self.least is None else mean.clamp(min=self.least)
                    state["scale"] = ((mean + 1e-3).to(self.dtype).pow(0.25),)
                p.sub_(group["lr"] * p.grad / state["scale"][0])
        self.steps += 1


def trained(folder: Path | None, *, least: float | None) -> tuple[list[Tensor], list[Tensor]]:
    """The weights and what the optimizer keeps of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = Refreshed(model.parameters(), least=least)
    scope = ampscope.watch(model, dir=folder, quiet=True) if folder is not None else None
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(torch.randn(16, 6)) - 3.0).square().mean().backward()
        optimizer.step()
    if scope is not None:
        scope.close()
    return list(model.parameters()), [each for p in optimizer.state for each in optimizer.state[p]["kept"]]


def diagnosed(folder: Path, *, least: float | None) -> Diagnosis:
    trained(folder, least=least)
    return ampscope.diagnose(folder)


def test_what_it_refreshes_now_and_then_is_told_in_that_step(run_folder: Path) -> None:
    primary = diagnosed(run_folder, least=None).primary
    assert isinstance(primary, Incident)
    assert (primary.op, primary.step, primary.phase) == ("aten.pow.Tensor_Scalar", BAD, "optimizer")
    assert primary.cause is Cause.SQRT_NEGATIVE
    assert primary.source is not None
    assert primary.source.function == "Refreshed.step"


def test_the_same_kept_above_zero_is_healthy(run_folder: Path) -> None:
    assert diagnosed(run_folder, least=0.0).verdict is Verdict.HEALTHY


@pytest.mark.parametrize("least", [None, 0.0])
def test_a_copy_of_it_shares_nothing_with_the_training(least: float | None, run_folder: Path) -> None:
    watched, alone = trained(run_folder, least=least), trained(None, least=least)
    for one, other in zip([*watched[0], *watched[1]], [*alone[0], *alone[1]], strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
