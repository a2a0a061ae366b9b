"""Loops that keep their weights by themselves, give them to the model, and look at their gradients by themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ampscope import diagnose
from ampscope.trace.vocabulary import Cause
from tests.support.primary import primary_incident
from tests.support.training.twin_runs import train_both

WIDTH, BATCH, STEPS, RATE = 8, 16, 8, 0.05
TOO_LARGE, FITTING = 2.0**24, 2.0**10
Weights = dict[str, Tensor]


class Kept:
    """A model, and the weights that the loop keeps for it."""

    def __init__(self, watch: Callable[..., object]) -> None:
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        watch(self.model)
        self.weights = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def loss(self, weights: Weights, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(functional_call(self.model, weights, (x,)).float(), x[..., :1])

    def slopes(self, scale: Any, *, each: bool = False) -> Weights:
        """Gradients of the scaled loss, in float16."""

        def scaled(weights: Weights, x: Tensor) -> Tensor:
            return self.loss(weights, x) * scale

        slopes: Any = torch.func.grad(scaled)
        slopes = torch.func.vmap(slopes, in_dims=(None, 0)) if each else slopes
        with torch.autocast("cpu", dtype=torch.float16):
            found: Weights = slopes(self.weights, torch.randn(BATCH, WIDTH))
        return {name: gradient.mean(0) for name, gradient in found.items()} if each else found

    def asked(self, scale: float) -> Weights:
        """The same of ``torch.autograd.grad``."""
        leaves = {name: weight.requires_grad_() for name, weight in self.weights.items()}
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.loss(leaves, torch.randn(BATCH, WIDTH))
        return dict(zip(leaves, torch.autograd.grad(loss * scale, list(leaves.values())), strict=True))


def _are_finite(gradients: Weights) -> bool:
    return all(bool(gradient.isfinite().all()) for gradient in gradients.values())


def left_out(slopes_of: Callable[[Kept, float], Weights], watch: Callable[..., object]) -> Any:
    """A scale that is halved, and a step that is not made, while gradients are not finite."""
    kept, scale = Kept(watch), TOO_LARGE
    for _ in range(2 * STEPS):
        slopes = slopes_of(kept, scale)
        if not _are_finite(slopes):
            scale /= 16
            continue
        kept.weights = {name: (w - RATE * slopes[name] / scale).detach() for name, w in kept.weights.items()}
    return kept.weights


def left_out_on_the_device(watch: Callable[..., object]) -> Any:
    """Nobody asks whether they are: a step that must not be made changes nothing."""
    kept, scale = Kept(watch), torch.tensor(TOO_LARGE)
    for _ in range(2 * STEPS):
        slopes = kept.slopes(scale)
        fine = torch.stack([slope.isfinite().all() for slope in slopes.values()]).all()
        kept.weights = {
            name: torch.where(fine, weight - RATE * (slopes[name] / scale), weight)
            for name, weight in kept.weights.items()
        }
        scale = torch.where(fine, scale, scale / 16)
    return kept.weights


def copied_on_the_device(watch: Callable[..., object]) -> Any:
    """The same with the model's own weights, into which the outcome is copied."""
    kept, scale = Kept(watch), torch.tensor(TOO_LARGE)
    parameters = list(kept.model.parameters())
    for _ in range(2 * STEPS):
        x = torch.randn(BATCH, WIDTH)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(kept.model(x).float(), x[:, :1])
        slopes = torch.autograd.grad(loss * scale, parameters)
        fine = torch.stack([slope.isfinite().all() for slope in slopes]).all()
        with torch.no_grad():
            for weight, slope in zip(parameters, slopes, strict=True):
                weight.copy_(torch.where(fine, weight - RATE * (slope / scale), weight))
        scale = torch.where(fine, scale, scale / 16)
    return kept.model


CORRECT: dict[str, Callable[..., Any]] = {
    "of a transform": lambda watch: left_out(Kept.slopes, watch),
    "of each sample": lambda watch: left_out(lambda kept, scale: kept.slopes(scale, each=True), watch),
    "asked for": lambda watch: left_out(Kept.asked, watch),
    "on the device": left_out_on_the_device,
    "copied on the device": copied_on_the_device,
}


@pytest.mark.parametrize("name", CORRECT)
def test_gradients_that_the_loop_leaves_out_are_no_incident(name: str, run_folder: Path) -> None:
    watched = train_both(CORRECT[name], run_folder)
    assert watched.steps
    assert diagnose(watched.run).verdict == "healthy"
    assert (watched.incidents, watched.findings, watched.warnings) == ([], [], [])


@pytest.mark.parametrize("slopes_of", [Kept.slopes, Kept.asked], ids=["of a transform", "asked for"])
def test_a_fixed_scale_that_nobody_checks_is_one(slopes_of: Callable[[Kept, float], Weights], run_folder: Path) -> None:
    def train(watch: Callable[..., object]) -> Any:
        kept = Kept(watch)
        for step in range(STEPS):
            scale = TOO_LARGE if step == 3 else FITTING
            slopes = slopes_of(kept, scale)
            kept.weights = {name: (w - RATE * slopes[name] / scale).detach() for name, w in kept.weights.items()}
        return kept.weights

    watched = train_both(train, run_folder)
    primary = primary_incident(watched.run)
    assert primary.step == 3
    assert primary.cause in (Cause.FP16_OVERFLOW, Cause.SCALE_OVERFLOW)
    assert primary.phase == "backward"


@pytest.mark.parametrize("moved", ["replaced", "written"])
@pytest.mark.parametrize("spans", [False, True])
def test_where_the_weights_are_moved_decides_what_autocast_spans(spans: bool, moved: str, run_folder: Path) -> None:
    """A step that the next call shows to be over has not ended in that call's autocast region."""

    def train(watch: Callable[..., object]) -> Any:
        kept = Kept(watch)
        with torch.autocast("cpu", dtype=torch.bfloat16) if spans else contextlib.nullcontext():
            for _ in range(STEPS):
                slopes = kept.slopes(FITTING)
                changes = {name: RATE * slope / FITTING for name, slope in slopes.items()}
                if moved == "replaced":
                    kept.weights = {name: weight - changes[name] for name, weight in kept.weights.items()}
                else:
                    torch._foreach_sub_(list(kept.weights.values()), list(changes.values()))
        return kept.weights

    causes = [row.cause for row in train_both(train, run_folder).findings]
    assert causes == ([Cause.MISUSE_AUTOCAST_SPANS_STEP] if spans else [])
