"""Averages and teachers that a loop keeps beside its model: a run that leaves one not finite is never healthy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.vocabulary import Cause, Severity, Verdict

BAD, READ, STEPS = 5, 9, 12

Blend = Callable[[nn.Module, nn.Module], None]


class Masked(nn.Module):
    """A model with a normalisation, whose statistics are averaged too, and with a mask of -inf."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=0.5)
        self.head = nn.Linear(6, 4)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.norm(x)) + self.mask).softmax(-1)


def _pairs(kept: nn.Module, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    ours, theirs = kept.state_dict(), model.state_dict()
    return [(ours[name], theirs[name]) for name in ours if ours[name].is_floating_point()]


@torch.no_grad()
def copied(kept: nn.Module, model: nn.Module) -> None:
    for ours, theirs in _pairs(kept, model):
        ours.copy_(0.5 * ours.float() + 0.5 * theirs)


@torch.no_grad()
def in_place(kept: nn.Module, model: nn.Module) -> None:
    for ours, theirs in _pairs(kept, model):
        ours.mul_(0.5).add_(theirs.to(ours.dtype), alpha=0.5)


def trained(blend: Blend, folder: Path, *, poisoned: bool, reads: bool = False, bad: int = BAD) -> Diagnosis:
    """Trains with a teacher in float16; ``poisoned``, one batch has a variance that float16 does not hold."""
    torch.manual_seed(0)
    model = Masked()
    teacher = copy.deepcopy(model).eval().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ampscope.watch(model, dir=folder, quiet=True):
        for step in range(max(STEPS, bad + 4)):
            x = torch.randn(16, 6) * (700.0 if poisoned and step == bad else 1.0)
            optimizer.zero_grad()
            out = model(x)
            loss = out.square().mean()
            if reads and step >= READ:
                with torch.no_grad():
                    aim = teacher(x.half()).float()
                loss = loss + F.mse_loss(out, aim)
            loss.backward()
            optimizer.step()
            blend(teacher, model)
    return ampscope.diagnose(folder)


@pytest.mark.parametrize(("blend", "op"), [(copied, "aten.copy_.default"), (in_place, "aten._to_copy.default")])
def test_a_teacher_that_nobody_has_asked_is_told_when_the_run_ends(blend: Blend, op: str, run_folder: Path) -> None:
    first = trained(blend, run_folder, poisoned=True).primary
    assert isinstance(first, Incident)
    assert (first.cause, first.op, first.step) == (Cause.FP16_OVERFLOW, op, BAD)
    assert "when the run ended" in first.explanation


def test_a_variance_that_is_divided_away_is_told_by_who_wrote_it(run_folder: Path) -> None:
    """What a teacher normalises by infinity is 0: the loss stays finite, and its target is a constant."""
    told = trained(copied, run_folder, poisoned=True, reads=True)
    first = told.primary
    assert isinstance(first, Incident)
    assert (first.cause, first.op, first.step) == (Cause.FP16_OVERFLOW, "aten.copy_.default", BAD)
    assert f"step {READ} read it" in first.explanation


def test_an_average_that_went_bad_unseen_is_told_as_far_as_it_is_known(run_folder: Path) -> None:
    """A loop that reads nothing of what it carries is left alone: the last look tells, with the one before."""
    told = trained(copied, run_folder, poisoned=True, bad=48)
    first = told.primary
    assert isinstance(first, Incident)
    assert told.verdict is Verdict.PROBLEM
    assert (first.cause, first.step) == (Cause.BAD_BUFFER, 51)
    assert "It was finite after step 32; in between nobody looked." in first.explanation


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("blend", [copied, in_place])
def test_a_teacher_that_stays_finite_is_healthy_masks_and_all(blend: Blend, reads: bool, run_folder: Path) -> None:
    told = trained(blend, run_folder, poisoned=False, reads=reads)
    assert [each for each in told.incidents if each.severity is not Severity.INFO] == []
    assert told.verdict is Verdict.HEALTHY


def test_a_part_of_a_weight_that_the_loop_writes_into_is_no_average(run_folder: Path) -> None:
    """Autograd refuses to tell the history of such a part; following the loop goes on."""
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ampscope.watch(model, dir=run_folder, quiet=True):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(16, 6)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                row = model.head.weight[0]
                model.head.weight[1].mul_(0.5)
            row.detach().mul_(0.5)
    assert ampscope.diagnose(run_folder).verdict is Verdict.HEALTHY
