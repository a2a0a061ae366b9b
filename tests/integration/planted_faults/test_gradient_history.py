"""What a loop keeps of its gradients' norms and edits later gradients by: the write that spoilt it is what is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.vocabulary import Cause, Verdict

#: The step whose gradients are large, and the first that reads what is known of them.
BAD, READ, STEPS = 3, 6, 9

Edit = Callable[[list[Tensor], int], None]


def slots() -> Edit:
    """The last norms, in float16; a limit by their mean and spread once there are enough."""
    norms = torch.zeros(READ).half()

    def edit(gradients: list[Tensor], step: int) -> None:
        norm = torch.stack([each.norm() for each in gradients]).norm()
        if step >= READ:
            limit = norms.float().mean() + 2 * norms.float().std()
            for each in gradients:
                each.mul_((limit / norm).clamp(max=1.0))
        norms[step % READ] = norm

    return edit


def moving_average() -> Edit:
    """The mean norm so far, in float16, written in place by parts of the new one."""
    mean = torch.ones(()).half()

    def edit(gradients: list[Tensor], step: int) -> None:
        norm = torch.stack([each.norm() for each in gradients]).norm()
        if step >= READ:
            torch._foreach_mul_(gradients, mean / (mean + norm))
        mean.mul_(0.5)
        mean.add_(norm, alpha=0.5)

    return edit


def limits_that_are_infinite_at_first() -> Edit:
    """No limit yet is an infinite one, and clips nothing."""
    limits = torch.full((STEPS,), torch.inf).half()

    def edit(gradients: list[Tensor], step: int) -> None:
        norm = torch.stack([each.norm() for each in gradients]).norm()
        for each in gradients:
            each.mul_((2 * limits.float().median() / norm).clamp(max=1.0))
        limits[step] = norm.clamp(max=100.0)

    return edit


def trained(edit: Edit, folder: Path, *, poisoned: bool) -> Diagnosis:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-8)
    with ampscope.watch(model, dir=folder, quiet=True):
        for step in range(STEPS):
            x = torch.randn(8, 6)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().mean() * (1e6 if poisoned and step == BAD else 1.0)
            loss.backward()
            edit([p.grad for p in model.parameters() if p.grad is not None], step)
            optimizer.step()
    return ampscope.diagnose(folder)


@pytest.mark.parametrize(("edit", "op"), [(slots, "aten.copy_.default"), (moving_average, "aten.add_.Tensor")])
def test_the_write_into_the_history_is_named(edit: Callable[[], Edit], op: str, run_folder: Path) -> None:
    told = trained(edit(), run_folder, poisoned=True)
    first = told.primary
    assert isinstance(first, Incident)
    assert (first.cause, first.op, first.step) == (Cause.FP16_OVERFLOW, op, BAD)
    suffers = next(each for each in told.incidents if each.step == READ)
    assert suffers.written_by is not None
    assert (suffers.written_by.step, suffers.written_by.op) == (BAD, op)
    assert all(each.cause is not Cause.HARDWARE_TRANSIENT for each in told.incidents)


@pytest.mark.parametrize("edit", [slots, moving_average, limits_that_are_infinite_at_first])
def test_edits_by_a_history_that_stays_finite_are_healthy(edit: Callable[[], Edit], run_folder: Path) -> None:
    assert trained(edit(), run_folder, poisoned=False).verdict is Verdict.HEALTHY
