"""Moving averages that a loop keeps in half precision: those that are rounded away, and their harmless twins."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Incident
from ampscope.trace.vocabulary import Cause, Verdict

Update = Callable[[list[Tensor], list[Tensor]], None]
_STEPS = 18


def by_lerp(averages: list[Tensor], weights: list[Tensor], tau: float = 5e-4) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.lerp_(weight.to(average.dtype), tau)


def in_two_steps(averages: list[Tensor], weights: list[Tensor]) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.mul_(0.9999).add_(weight.to(average.dtype), alpha=1e-4)


def written_anew(averages: list[Tensor], weights: list[Tensor]) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(0.9998 * average + 0.0002 * weight)


def all_at_once(averages: list[Tensor], weights: list[Tensor]) -> None:
    torch._foreach_lerp_(averages, [weight.to(averages[0].dtype) for weight in weights], 5e-4)


def follows(averages: list[Tensor], weights: list[Tensor]) -> None:
    by_lerp(averages, weights, 0.3)


def stays(averages: list[Tensor], weights: list[Tensor]) -> None:
    by_lerp(averages, weights, 0.0)


def trained(update: Update, dtype: torch.dtype, folder: Path, *, lr: float = 0.1, in_copy: bool = False) -> Diagnosis:
    """A regression whose weights move far, and averages of them outside the watched model, or in a copy of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    averages: list[Tensor] = [parameter.detach().clone().to(dtype) for parameter in model.parameters()]
    if in_copy:
        averages = list(copy.deepcopy(model).to(dtype).parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    with ampscope.watch(model, dir=folder, quiet=True):
        for _ in range(_STEPS):
            x = torch.randn(16, 6)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x).float() - 5 * x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                update(averages, [parameter.detach() for parameter in model.parameters()])
    return ampscope.diagnose(folder)


@pytest.mark.parametrize(
    ("update", "dtype", "cause", "op"),
    [
        (by_lerp, torch.bfloat16, Cause.BF16_PRECISION, "aten.lerp_.Scalar"),
        (in_two_steps, torch.float16, Cause.STAGNATION, "aten.add_.Tensor"),
        (written_anew, torch.bfloat16, Cause.BF16_PRECISION, "aten.copy_.default"),
        (all_at_once, torch.bfloat16, Cause.BF16_PRECISION, "aten._foreach_lerp_.Scalar"),
    ],
)
def test_an_average_that_is_rounded_away_is_told_at_its_write(
    update: Update, dtype: torch.dtype, cause: Cause, op: str, tmp_path: Path
) -> None:
    found = trained(update, dtype, tmp_path).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.phase, found.op, found.step) == (cause, "optimizer", op, 0)
    assert found.source is not None
    assert found.source.file.endswith("test_still_targets.py")
    assert "did not move" in found.explanation


@pytest.mark.parametrize(("update", "dtype"), [(by_lerp, torch.bfloat16), (in_two_steps, torch.float16)])
def test_so_is_one_that_is_kept_as_the_weights_of_a_copy(update: Update, dtype: torch.dtype, tmp_path: Path) -> None:
    found = trained(update, dtype, tmp_path, in_copy=True).primary
    assert isinstance(found, Incident)
    assert (found.phase, found.step) == ("optimizer", 0)
    assert "did not move" in found.explanation


@pytest.mark.parametrize("update", [follows, stays])
def test_and_its_twins_are_not(update: Update, tmp_path: Path) -> None:
    assert trained(update, torch.bfloat16, tmp_path, in_copy=True).verdict is Verdict.HEALTHY


@pytest.mark.parametrize(
    ("update", "dtype", "lr"),
    [
        (by_lerp, torch.bfloat16, 0.0),
        (by_lerp, torch.float32, 0.1),
        (follows, torch.bfloat16, 0.1),
        (stays, torch.bfloat16, 0.1),
        (in_two_steps, torch.float16, 1e-6),
        (written_anew, torch.float32, 0.1),
    ],
    ids=["it has nothing to follow", "in float32", "it follows", "it is told to stay", "at rest", "anew in float32"],
)
def test_its_harmless_twins_are_not(update: Update, dtype: torch.dtype, lr: float, tmp_path: Path) -> None:
    assert trained(update, dtype, tmp_path, lr=lr).verdict is Verdict.HEALTHY


def test_a_counter_in_bfloat16_that_sticks(tmp_path: Path) -> None:
    def counted(averages: list[Tensor], _: list[Tensor]) -> None:
        averages[0].add_(1)

    def many(averages: list[Tensor], weights: list[Tensor]) -> None:
        averages[0].add_(256) if float(averages[0].flatten()[0]) < 200 else counted(averages, weights)

    found = trained(many, torch.bfloat16, tmp_path).primary
    assert isinstance(found, Incident)
    assert (found.cause, found.op) == (Cause.BF16_PRECISION, "aten.add_.Tensor")
