"""Hooks that move weights inside a backward, by an optimizer for each parameter or by hand: the backward is a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope import diagnose
from ampscope.trace.vocabulary import Cause
from tests.support.primary import primary_incident
from tests.support.training.small_loop import POISONED, STEPS, make_batch, mlp
from tests.support.training.twin_runs import train_both

Hooks = Callable[[nn.Module], Callable[[Tensor], None]]


def optimizers(model: nn.Module) -> Callable[[Tensor], None]:
    """As torch's tutorial on saving the memory of gradients has it."""
    of = {id(parameter): torch.optim.Adam([parameter], lr=0.01) for parameter in model.parameters()}

    def hook(parameter: Tensor) -> None:
        of[id(parameter)].step()
        of[id(parameter)].zero_grad()

    return hook


def by_hand(_: nn.Module) -> Callable[[Tensor], None]:
    @torch.no_grad()
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=0.01)
        parameter.grad = None

    return hook


def train(watch: Callable[..., object], hooks: Hooks, *, bad: bool) -> dict[str, Any]:
    model = mlp()
    hook = hooks(model)
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        parameter.register_post_accumulate_grad_hook(hook)
    watch(model)
    losses = []
    for step in range(STEPS):
        x, y = make_batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        loss = F.mse_loss(out.float(), y)
        if bad and step == POISONED:
            loss = loss + torch.sqrt((out - out).sum())
        loss.backward()
        losses.append(loss.item())
    return {"model": model, "losses": losses}


@pytest.mark.parametrize("hooks", [optimizers, by_hand])
def test_each_backward_is_one_step(hooks: Hooks, run_folder: Path) -> None:
    watched = train_both(partial(train, hooks=hooks, bad=False), run_folder)
    assert [row.step for row in watched.steps] == list(range(STEPS))
    assert diagnose(watched.run).verdict == "healthy"
    assert (watched.findings, watched.warnings) == ([], [])


@pytest.mark.parametrize("hooks", [optimizers, by_hand])
def test_what_goes_wrong_is_told_of_its_step(hooks: Hooks, run_folder: Path) -> None:
    watched = train_both(partial(train, hooks=hooks, bad=True), run_folder)
    primary = primary_incident(watched.run)
    assert (primary.cause, primary.step) == (Cause.SQRT_GRAD_ZERO, POISONED)
    assert primary.source is not None
    assert "torch.sqrt" in primary.source.code
    assert watched.warnings == []


def test_a_frozen_weight_made_in_inference_mode_is_no_fault(run_folder: Path) -> None:
    """It has no count of the writes to it."""

    def with_frozen(watch: Callable[..., object]) -> dict[str, Any]:
        def hooks(model: nn.Module) -> Callable[[Tensor], None]:
            with torch.inference_mode():
                model.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
            return by_hand(model)

        return train(watch, hooks, bad=False)

    watched = train_both(with_frozen, run_folder)
    assert [row.step for row in watched.steps] == list(range(STEPS))
    assert watched.warnings == []
