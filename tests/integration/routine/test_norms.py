"""The gradient norm of a step is that before the loop clips; what the optimizer was given stands beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ampscope
from ampscope.trace.schema import StepRow, Table

STEPS = 30


def rows(
    folder: Path, *, scaler: bool, parts: int = 1, clip: Callable[[list[nn.Parameter]], float]
) -> tuple[list[StepRow], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=1e-4)
    scale = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaler)
    norms = []
    with ampscope.watch(model, scale if scaler else None, dir=folder, quiet=True) as scope:
        for _ in range(STEPS):
            optimizer.zero_grad()
            for _ in range(parts):
                x = torch.randn(32, 16)
                with torch.autocast("cpu", torch.float16 if scaler else torch.bfloat16):
                    loss = 100 / parts * nn.functional.mse_loss(model(x).squeeze(-1).float(), x.mean(-1))
                scale.scale(loss).backward()
            scale.unscale_(optimizer)
            norms.append(clip(weights))
            scale.step(optimizer)
            scale.update()
    return ampscope.open_run(scope.folder).rows(Table.STEPS), norms


def clips(weights: list[nn.Parameter]) -> float:
    return float(nn.utils.clip_grad_norm_(weights, 1.0))


def halves(weights: list[nn.Parameter]) -> float:
    grads = [weight.grad for weight in weights if weight.grad is not None]
    norm = float(torch.stack([grad.norm() for grad in grads]).norm())
    torch._foreach_mul_(grads, 0.5)
    return norm


def looks(weights: list[nn.Parameter]) -> float:
    return float(torch.stack([weight.grad.norm() for weight in weights if weight.grad is not None]).norm())


@pytest.mark.parametrize("scaler", [True, False], ids=["scaler", "bf16"])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_norm_is_that_before_clipping(scaler: bool, parts: int, run_folder: Path) -> None:
    steps, norms = rows(run_folder, scaler=scaler, parts=parts, clip=clips)
    assert [step.grad_norm for step in steps] == pytest.approx(norms, rel=1e-4)
    if not scaler:  # with one it is not asked for: torch's own clipping makes finite gradients of finite ones
        assert [step.clipped_grad_norm for step in steps] == pytest.approx([1.0] * STEPS, rel=1e-4)


@pytest.mark.parametrize("scaler", [True, False], ids=["scaler", "bf16"])
def test_whatever_the_loop_does_to_gradients_counts(scaler: bool, run_folder: Path) -> None:
    steps, norms = rows(run_folder, scaler=scaler, clip=halves)
    assert [step.grad_norm for step in steps] == pytest.approx(norms, rel=1e-4)
    assert [step.clipped_grad_norm for step in steps] == pytest.approx([norm / 2 for norm in norms], rel=1e-4)


@pytest.mark.parametrize("scaler", [True, False], ids=["scaler", "bf16"])
def test_a_loop_that_only_looks_has_one_norm(scaler: bool, run_folder: Path) -> None:
    steps, norms = rows(run_folder, scaler=scaler, clip=looks)
    assert [step.grad_norm for step in steps] == pytest.approx(norms, rel=1e-4)
    assert {step.clipped_grad_norm for step in steps} == {None}
