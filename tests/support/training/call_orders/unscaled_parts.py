"""Losses of which a part was scaled, and a part was not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampscope.trace.vocabulary import Cause
from tests.support.training.call_orders.registry import right, wrong
from tests.support.training.usage_bench import STEPS, Bench, Watch


def size_of(bench: Bench) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in bench.parameters]).sum()


@wrong(Cause.MISUSE_MISSING_SCALER)
def a_loss_added_that_was_not_scaled(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        (bench.scaler.scale(bench.loss()) + 0.1 * bench.loss(-1.0)).backward()
        bench.step()


@wrong(Cause.MISUSE_MISSING_SCALER)
def a_decay_added_that_was_not_scaled(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        (bench.scaler.scale(bench.loss()) + 0.1 * size_of(bench)).backward()
        bench.step()


@wrong(Cause.MISUSE_MISSING_SCALER)
def a_loss_beside_another_that_was_not_scaled(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        torch.autograd.backward([bench.scaler.scale(bench.loss()), bench.loss(-1.0)])
        bench.step()


@wrong(Cause.MISUSE_MISSING_SCALER)
def a_decay_that_was_not_scaled_of_what_the_second_of_two_optimizers_steps(watch: Watch) -> None:
    bench = Bench(watch)
    optimizers = [torch.optim.SGD(each, 1e-3) for each in (bench.parameters[:2], bench.parameters[2:])]
    for _ in range(STEPS):
        bench.model.zero_grad()
        (bench.scaler.scale(bench.loss()) + 0.1 * bench.parameters[2].square().sum()).backward()
        for optimizer in optimizers:
            bench.scaler.step(optimizer)
        bench.scaler.update()


@right
def losses_scaled_beside_each_other(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        by_hand = bench.loss(-1.0) * bench.scaler.get_scale()
        scaled = bench.scaler.scale([bench.loss(), 0.5 * size_of(bench)])
        torch.autograd.backward([*scaled, scaled[0] / 2, by_hand])
        bench.step()
    return bench.state


@right
def a_loss_beside_another_with_the_scale_as_its_seed(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        one, other = bench.scaler.scale(bench.loss()), bench.loss(-1.0)
        torch.autograd.backward([one, other], [torch.ones_like(one), torch.full_like(other, bench.scaler.get_scale())])
        bench.step()
    return bench.state


@right
def parameters_kept_in_the_graph_by_a_part_of_zero(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        scaled = bench.scaler.scale(bench.loss())
        unused = 0.0 * size_of(bench) + sum((parameter * 0.0).sum() for parameter in bench.parameters)
        (scaled + unused + 1.0).backward()
        bench.step()
    return bench.state


@right
def a_part_multiplied_by_the_scale_by_hand(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        (bench.scaler.scale(bench.loss()) + 0.1 * size_of(bench) * bench.scaler.get_scale()).backward()
        bench.step()
    return bench.state


@right
def a_penalty_on_scaled_gradients_beside_their_loss(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        scaled = bench.scaler.scale(bench.loss())
        gradients = torch.autograd.grad(scaled, bench.parameters, create_graph=True)
        (scaled + 0.1 * torch.stack([each.norm() for each in gradients]).norm()).backward()
        bench.step()
    return bench.state


class TimesTheScale(torch.autograd.Function):
    """Leaves a loss as it is, and gives its backward the scale."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


@right
def a_part_whose_own_backward_brings_the_scale(watch: Watch) -> Any:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.optimizer.zero_grad()
        other: Any = TimesTheScale.apply(size_of(bench), bench.scaler.get_scale())
        (bench.scaler.scale(bench.loss()) + other).backward()
        bench.step()
    return bench.state
