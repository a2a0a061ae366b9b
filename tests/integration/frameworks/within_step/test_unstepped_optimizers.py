"""Loops that move weights by hand although an optimizer holds these: it only zeroes gradients, or keeps the rate."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampscope import diagnose
from ampscope.trace.vocabulary import Cause, Verdict
from tests.integration.frameworks.within_step.log_model import batch, log_model, loss_of
from tests.support.primary import primary_incident
from tests.support.training.small_loop import POISONED, STEPS, make_scaler
from tests.support.training.twin_runs import train_both

RATE = 0.01
Weights = list[nn.Parameter]
Move = Callable[[torch.optim.Optimizer, Weights, float], None]


def _slopes(weights: Weights, scale: float) -> list[Tensor]:
    return [weight.grad / scale for weight in weights if weight.grad is not None]


def beside(optimizer: torch.optim.Optimizer, weights: Weights, scale: float) -> None:
    """The optimizer is made, and that is all."""
    with torch.no_grad():
        for weight, slope in zip(weights, _slopes(weights, scale), strict=True):
            operator.isub(weight, RATE * slope)  # what `weight -= ...` calls
    for weight in weights:
        weight.grad = None


def zeroing(optimizer: torch.optim.Optimizer, weights: Weights, scale: float) -> None:
    for weight, slope in zip(weights, _slopes(weights, scale), strict=True):
        weight.data = weight.data - RATE * slope
    optimizer.zero_grad()


def keeping_the_rate(optimizer: torch.optim.Optimizer, weights: Weights, scale: float) -> None:
    with torch.no_grad():
        for weight, slope in zip(weights, _slopes(weights, scale), strict=True):
            weight.add_(slope, alpha=-optimizer.param_groups[0]["lr"])
    optimizer.zero_grad(set_to_none=False)


def trained(watch: Callable[..., Any], move: Move, *, scaled: bool, bad_at: int) -> Any:
    model, scaler = log_model(), make_scaler() if scaled else None
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, RATE)
    watch(model)
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.float16 if scaled else torch.bfloat16):
            loss = loss_of(model, *batch(empty=step == bad_at))
        (scaler.scale(loss) if scaler is not None else loss).backward()
        move(optimizer, weights, scaler.get_scale() if scaler is not None else 1.0)
    return model


@pytest.mark.parametrize("scaled", [False, True], ids=["bfloat16", "scaled"])
@pytest.mark.parametrize("move", [beside, zeroing, keeping_the_rate], ids=lambda each: each.__name__)
def test_each_move_is_a_step(move: Move, scaled: bool, run_folder: Path) -> None:
    watched = train_both(partial(trained, move=move, scaled=scaled, bad_at=-1), run_folder)
    assert diagnose(watched.run).verdict is Verdict.HEALTHY
    assert [(row.step, row.micro_batches) for row in watched.steps] == [(step, 1) for step in range(STEPS)]
    assert len({row.loss for row in watched.steps}) == STEPS
    assert (watched.findings, watched.warnings) == ([], [])


@pytest.mark.parametrize("scaled", [False, True], ids=["bfloat16", "scaled"])
@pytest.mark.parametrize("move", [beside, zeroing, keeping_the_rate], ids=lambda each: each.__name__)
def test_what_goes_wrong_is_told_in_its_own_step(move: Move, scaled: bool, run_folder: Path) -> None:
    watched = train_both(partial(trained, move=move, scaled=scaled, bad_at=POISONED), run_folder)
    primary = primary_incident(watched.run)
    assert (primary.cause, primary.op, primary.module) == (Cause.LOG_ZERO, "aten.log.default", "1")
    assert primary.step == POISONED


def still_scaled(optimizer: torch.optim.Optimizer, weights: Weights, _: float) -> None:
    beside(optimizer, weights, 1.0)


def test_a_move_by_gradients_that_still_carry_the_scale_is_told(run_folder: Path) -> None:
    watched = train_both(partial(trained, move=still_scaled, scaled=True, bad_at=-1), run_folder)
    assert {row.cause for row in watched.findings} == {Cause.MISUSE_NO_UNSCALE}


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_too_short_to_tell_counts_its_moves_as_it_ends(steps: int, run_folder: Path) -> None:
    def loop(watch: Callable[..., Any]) -> Any:
        model = log_model()
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        watch(model)
        for _ in range(steps):
            loss_of(model, *batch()).backward()
            zeroing(optimizer, list(model.parameters()), 1.0)
        return model

    watched = train_both(loop, run_folder)
    assert diagnose(watched.run).verdict is Verdict.HEALTHY
    assert [row.step for row in watched.steps] == list(range(steps))


def test_an_optimizer_that_steps_after_all_goes_on_counting(run_folder: Path) -> None:
    """Inner steps by hand on the weights themselves, and then a step of the optimizer (Reptile)."""

    def loop(watch: Callable[..., Any]) -> Any:
        model = log_model()
        weights = list(model.parameters())
        optimizer = torch.optim.SGD(weights, RATE)
        watch(model)
        for _ in range(STEPS):
            start = [weight.detach().clone() for weight in weights]
            for _ in range(4):
                optimizer.zero_grad()
                loss_of(model, *batch()).backward()
                with torch.no_grad():
                    torch._foreach_sub_(list[Tensor](weights), _slopes(weights, 1.0), alpha=RATE)
            with torch.no_grad():
                for weight, before in zip(weights, start, strict=True):
                    weight.grad = before - weight
                    weight.copy_(before)
            optimizer.step()
        return model

    watched = train_both(loop, run_folder)
    assert diagnose(watched.run).verdict is Verdict.HEALTHY
    assert watched.warnings == []


@pytest.mark.parametrize(("climbs", "uncounted"), [(2, 0), (5, 5)])
def test_a_loop_that_climbs_several_times_before_its_optimizer_steps(
    climbs: int, uncounted: int, run_folder: Path
) -> None:
    """At first long climbs are taken for steps; from the optimizer's own first step on, they are not."""

    def loop(watch: Callable[..., Any]) -> Any:
        model = log_model()
        weights = list(model.parameters())
        optimizer = torch.optim.SGD(weights, RATE)
        watch(model)
        for _ in range(STEPS):
            start = [weight.detach().clone() for weight in weights]
            for _ in range(climbs):
                optimizer.zero_grad()
                loss_of(model, *batch()).backward()
                with torch.no_grad():
                    torch._foreach_add_(list[Tensor](weights), _slopes(weights, 1.0), alpha=RATE)
            optimizer.zero_grad()
            loss_of(model, *batch()).backward()
            with torch.no_grad():
                for weight, before in zip(weights, start, strict=True):
                    weight.copy_(before)
            optimizer.step()
        return model

    watched = train_both(loop, run_folder)
    assert diagnose(watched.run).verdict is Verdict.HEALTHY
    assert [row.step for row in watched.steps] == list(range(STEPS + uncounted))
