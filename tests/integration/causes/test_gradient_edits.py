"""What a loop does to gradients after backward is run again, and the op in it that fails is named."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.vocabulary import Cause, Verdict

STEPS, BAD = 14, 12

Edit = Callable[[list[nn.Parameter]], None]


class Gated(nn.Module):
    """A branch that may be switched off, and gets gradients of exactly zero then."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.gate = nn.Linear(6, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, open_gate: bool) -> Tensor:
        return self.head(torch.tanh(self.body(x)) + float(open_gate) * torch.sigmoid(self.gate(x)))


def grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def in_place(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        grad(p).div_(grad(p).norm())


def assigned(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.grad = grad(p) / grad(p).norm()


def through_data(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        grad(p).data /= grad(p).data.norm()


def copied(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        grad(p).copy_(grad(p) / grad(p).norm())


def with_eps(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        grad(p).div_(grad(p).norm() + 1e-8)


def trained(edit: Edit, folder: Path, *, shut: int = BAD, seen: Callable[[nn.Module], None] | None = None) -> Diagnosis:
    torch.manual_seed(0)
    model = Gated()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with ampscope.watch(model, dir=folder):
        for step in range(STEPS):
            x = torch.randn(8, 6)
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(x, step != shut).float() - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            edit(list(model.parameters()))
            optimizer.step()
            if seen is not None:
                seen(model)
    return ampscope.diagnose(folder)


@pytest.mark.parametrize("edit", [in_place, assigned, through_data, copied], ids=lambda edit: edit.__name__)
def test_a_gradient_divided_by_its_norm_of_zero_is_named(edit: Edit, run_folder: Path) -> None:
    primary = trained(edit, run_folder).primary
    assert isinstance(primary, Incident)
    assert (primary.cause, primary.step) == (Cause.DIV_ZERO, BAD)
    assert primary.op in ("aten.div.Tensor", "aten.div_.Tensor")
    assert primary.source is not None
    assert (primary.source.function, Path(primary.source.file).name) == (edit.__name__, Path(__file__).name)
    assert primary.replay == "exact"


@pytest.mark.parametrize("edit", [with_eps, in_place], ids=lambda edit: edit.__name__)
def test_the_same_without_a_norm_of_zero_is_healthy(edit: Edit, run_folder: Path) -> None:
    shut = BAD if edit is with_eps else -1
    assert trained(edit, run_folder, shut=shut).verdict == Verdict.HEALTHY


def test_a_threshold_of_the_loop_that_went_bad_earlier_is_told_with_its_step(run_folder: Path) -> None:
    norms, at = torch.zeros(4, dtype=torch.float16), [0]

    def clipped(parameters: list[nn.Parameter]) -> None:
        norm = torch.stack([grad(p).norm() for p in parameters]).norm() * (1e6 if at[0] == 5 else 1.0)
        if at[0] >= 8:
            limit = norms.float().mean() + norms.float().std()
            for p in parameters:
                grad(p).mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        norms[at[0] % 4 if at[0] < 6 else 3] = norm
        at[0] += 1

    primary = trained(clipped, run_folder, shut=-1).primary
    assert isinstance(primary, Incident)
    assert (primary.cause, primary.step) == (Cause.FP16_OVERFLOW, 5)
    assert "step 8 read it" in primary.explanation


def test_the_tape_keeps_no_gradient_that_the_loop_has_edited(run_folder: Path) -> None:
    left: list[weakref.ref[Tensor]] = []
    alive = []

    def seen(model: nn.Module) -> None:
        left[:] = [weakref.ref(grad(p)) for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        alive.append(sum(ref() is not None for ref in left))

    trained(in_place, run_folder, shut=-1, seen=seen)
    assert alive == [0] * STEPS
