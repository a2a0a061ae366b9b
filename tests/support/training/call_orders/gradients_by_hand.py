"""Gradients in the loss, and gradients that the loop edits by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ampscope.trace.vocabulary import Cause
from tests.support.training.call_orders.registry import RIGHT, WRONG, right, wrong
from tests.support.training.usage_bench import (
    BATCH,
    STEPS,
    WIDTH,
    Bench,
    Watch,
)


def penalized(watch: Watch, *, unscale: bool) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        loss = bench.loss()
        gradients = torch.autograd.grad(bench.scaler.scale(loss), bench.parameters, create_graph=True)
        inverse = 1.0 / bench.scaler.get_scale() if unscale else 1.0
        penalty = sum((gradient * inverse).pow(2).sum() for gradient in gradients) ** 0.5
        bench.scaler.scale(loss + 1e-3 * penalty).backward()
        bench.step()
    return bench.state


RIGHT["a_penalty_on_unscaled_gradients"] = lambda watch: penalized(watch, unscale=True)
WRONG["a_penalty_on_scaled_gradients"] = lambda watch: penalized(watch, unscale=False), Cause.MISUSE_NO_UNSCALE, 0


@right
def a_penalty_on_gradients_of_a_loss_scaled_by_hand(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        loss, scale = bench.loss(), bench.scaler.get_scale()
        gradients = torch.autograd.grad(loss * scale, bench.parameters, create_graph=True)
        penalty = sum((gradient / scale).pow(2).sum() for gradient in gradients) ** 0.5
        bench.scaler.scale(loss + 1e-3 * penalty).backward()
        bench.step()
    return bench.state


@wrong(Cause.MISUSE_NO_UNSCALE)
def a_penalty_on_gradients_of_a_loss_scaled_by_hand_and_left_so(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        loss = bench.loss()
        gradients = torch.autograd.grad(loss * bench.scaler.get_scale(), bench.parameters, create_graph=True)
        penalty = sum(gradient.pow(2).sum() for gradient in gradients) ** 0.5
        bench.scaler.scale(loss + 1e-3 * penalty).backward()
        bench.step()
    return bench.state


@right
def a_fixed_scale_by_hand_and_no_scaler(watch: Watch) -> Any:
    bench = Bench(lambda model, _: watch(model))
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        (bench.loss() * 1024).backward()
        for gradient in bench.gradients:
            gradient.div_(1024)
        bench.optimizer.step()
    return bench.state


@right
def unscaled_and_stepped_by_hand(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.scaled()
        inverse = 1.0 / bench.scaler.get_scale()
        for gradient in bench.gradients:
            gradient.mul_(inverse)
        if math.isfinite(nn.utils.clip_grad_norm_(bench.parameters, 1.0)):
            bench.optimizer.step()
    return bench.state


@right
def two_forwards_to_a_step(watch: Watch) -> Any:
    """Sharpness-aware minimization: up along the gradient, a second gradient there, back down, step."""
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.scaled()
        bench.scaler.unscale_(bench.optimizer)
        moves = [gradient * (0.05 / (bench.norm + 1e-12)) for gradient in bench.gradients]
        bench.scaler.update()
        for sign in (1.0, -1.0):
            with torch.no_grad():
                torch._foreach_add_([*bench.parameters], moves, alpha=sign)
            if sign > 0:
                bench.scaled()
                bench.scaler.unscale_(bench.optimizer)
        bench.step()
    return bench.state


@right
def losses_where_thrown_away_gradients_were(watch: Watch) -> Any:
    """A probing backward before each step; what the allocator gives the next loss is the memory of its gradients."""
    bench = Bench(watch)
    for _ in range(10 * STEPS):
        bench.scaled()
        bench.optimizer.zero_grad()
        losses = [bench.loss() * 0.25 for _ in range(4)]
        bench.scaler.scale(torch.stack(losses).sum()).backward()
        bench.step()
    return bench.state


@right
def divided_by_as_many_rows_as_the_scale_is_large(watch: Watch) -> Any:
    bench = Bench(watch, scale=256.0)
    for _ in bench.steps():
        assert bench.scaler.get_scale() == 256
        for gradient in bench.gradients:
            gradient.div_(256)
    return bench.state


@wrong(Cause.MISUSE_NO_UNSCALE)
def divided_by_the_scale_times_the_micro_batches(watch: Watch) -> None:
    bench = Bench(watch, scale=256.0)
    for _ in bench.steps():
        for gradient in bench.gradients:
            gradient.div_(bench.scaler.get_scale() * 2)


@right
def an_auxiliary_model_in_float32(watch: Watch) -> Any:
    bench, other = Bench(watch), nn.Linear(WIDTH, 1)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        loss = bench.loss()
        other(torch.randn(BATCH, WIDTH)).mean().backward()
        bench.scaler.scale(loss).backward()
        bench.step()
    return [*bench.state, other]


@right
def a_fused_optimizer_clipped_after_unscale(watch: Watch) -> Any:
    bench = Bench(watch, optimizer=torch.optim.Adam, fused=True)
    for _ in bench.steps():
        bench.scaler.unscale_(bench.optimizer)
        nn.utils.clip_grad_norm_(bench.parameters, 1.0)
    return bench.state


@wrong(Cause.MISUSE_CLIP_BEFORE_UNSCALE)
def a_fused_optimizer_clipped_while_scaled(watch: Watch) -> None:
    bench = Bench(watch, optimizer=torch.optim.Adam, fused=True)
    for _ in bench.steps():
        nn.utils.clip_grad_norm_(bench.parameters, 1.0)
