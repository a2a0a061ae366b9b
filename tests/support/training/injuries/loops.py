"""Trainings that between them have nearly all of capture run: what one does not call, another does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.training import guarded_training
from tests.support.training.call_orders import RIGHT, WRONG
from tests.support.training.model_parts import linear
from tests.support.training.small_loop import BATCH, GAIN, WIDTH, make_batch, make_scaler, mlp, mse
from tests.support.training.twin_runs import Loop

Watch = Callable[..., Any]

STEPS = 6
#: The step at which the loops of this module meet what they are about.
AT = 3


def with_a_closure(watch: Watch) -> Any:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    watch(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, *make_batch())
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return [model, optimizer]


class Refusing(nn.Module):
    """Calls a function of torch at a step with what it cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.step = mlp(), 0
        self.seen: Tensor = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)
        self.seen = self.seen * 0.5 + hidden.detach().mean(0).float()
        if self.step == AT:
            return hidden.half() @ torch.ones(WIDTH, WIDTH)
        return hidden


def that_goes_on_after_exceptions(watch: Watch) -> Any:
    model = Refusing()
    optimizer, scaler = torch.optim.Adam(model.parameters(), 0.01), make_scaler()
    watch(model, scaler)
    raised: list[str] = []
    for model.step in range(2 * STEPS):
        optimizer.zero_grad()
        try:
            loss = mse(model, *make_batch())
            if model.step == AT + 2:
                loss.register_hook(_refuse)
            scaler.scale(loss).backward()
        except (RuntimeError, ArithmeticError) as error:
            raised.append(repr(error))
            continue
        scaler.step(optimizer)
        scaler.update()
    return [model, optimizer, scaler, raised]


def _refuse(_: Tensor) -> None:
    raise ArithmeticError


def in_half_precision(watch: Watch) -> Any:
    """Updates that are rounded away, averages beside the model, and state that overflows at last."""
    model = mlp().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    average = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    watch(model)
    for step in range(8 * STEPS):
        optimizer.zero_grad()
        x, y = make_batch()
        loss = mse(model, x.bfloat16(), y.bfloat16())
        (loss * (float("inf") if step == 7 * STEPS else 1.0)).backward()
        optimizer.step()
        for name, weight in model.named_parameters():
            average[name].mul_(0.999).add_(weight.detach(), alpha=0.001)
    return [model, optimizer, average]


def that_carries_a_tensor(watch: Watch) -> Any:
    """It overflows between two steps, and a later step reads it."""
    model, carried = mlp(), torch.ones(WIDTH, dtype=torch.float16)
    first = linear(model, "0")
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
    watch(model, scaler)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mse(model, torch.randn(BATCH, WIDTH) * carried, torch.zeros(BATCH, WIDTH))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        carried.mul_(GAIN if step == AT else 0.9).add_(first.weight.detach().mean().half())
    return [model, optimizer, scaler, carried]


def by_hand(watch: Watch) -> Any:
    """Moves its weights itself, and spoils them."""
    model = mlp()
    watch(model)
    for step in range(2 * STEPS):
        gradients = torch.autograd.grad(mse(model, *make_batch()), list(model.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight.sub_(0.01 * gradient * (float("inf") if step == STEPS else 1.0))
    return [model]


LOOPS: dict[str, Loop] = {
    "guarded": guarded_training.training,
    "transform": RIGHT["a_transform_of_a_loss_scaled_by_a_tensor"],
    "past the scaler": WRONG["one_of_two_optimizers_past_the_scaler"][0],
    "fused": RIGHT["a_fused_optimizer_clipped_after_unscale"],
    "hand scale": RIGHT["a_dynamic_scale_by_hand"],
    "closure": with_a_closure,
    "exceptions": that_goes_on_after_exceptions,
    "half": in_half_precision,
    "carried": that_carries_a_tensor,
    "by hand": by_hand,
}
