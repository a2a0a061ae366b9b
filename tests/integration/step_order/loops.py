"""The loops whose steps are listened to beside `tests.integration.loops` and the orders of calls that people write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.integration.loops import handwritten_loss
from tests.support.training import small_loop

Watch = Callable[..., Any]


def small(watch: Watch) -> Any:
    return small_loop.train(watch, small_loop.mlp())


def small_traced(watch: Watch) -> Any:
    return small_loop.train(lambda model, scaler: watch(model, scaler, every=1), small_loop.mlp())


def small_healed(watch: Watch) -> Any:
    return small_loop.train(lambda model, scaler: watch(model, scaler, heal=True), small_loop.mlp())


def one_good_step(watch: Watch) -> Any:
    return small_loop.train(watch, small_loop.mlp(), steps=1)


def one_skipped_step(watch: Watch) -> Any:
    return small_loop.train(watch, small_loop.mlp(), lambda *given: small_loop.mse(*given) * small_loop.GAIN, steps=1)


def accumulated_and_clipped(watch: Watch) -> None:
    model = small_loop.mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), small_loop.make_scaler()
    watch(model, scaler)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = small_loop.mse(model, *small_loop.make_batch()) / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def one_closure(watch: Watch) -> None:
    model = small_loop.mlp()
    watch(model)
    _step_with_closure(model, torch.optim.LBFGS(model.parameters(), max_iter=2))


def with_closure(watch: Watch) -> None:
    model = small_loop.mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    watch(model)
    for _ in range(small_loop.STEPS):
        _step_with_closure(model, optimizer)


def _step_with_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(small_loop.make_batch()[0]).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def beside_another(watch: Watch) -> None:
    """Its region is for CUDA; another model's optimizer steps first, and a schedule has the last word."""
    model, other = small_loop.mlp(), small_loop.mlp()
    optimizer, of_other = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, other))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    watch(model)
    x, _ = small_loop.make_batch()
    with torch.autocast("cuda"):
        loss = small_loop.mse(model, x, other(x))
    loss.backward()
    of_other.step()
    optimizer.step()
    schedule.step()


class Handed:
    """Moves the weights itself: no hook of torch's tells that it has stepped."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(self.param_groups[0]["lr"] * parameter.grad)


def handed_and_scheduled(watch: Watch) -> None:
    """Where the schedule has its step, nothing but it tells that the optimizer's is over."""
    model = small_loop.mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), small_loop.make_scaler()
    handed: Any = Handed(optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    watch(model, scaler)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = small_loop.mse(model, *small_loop.make_batch())
        scaler.scale(loss).backward()
        scaler.step(handed)
        schedule.step()
        scaler.update()


class OwnRegion(nn.Module):
    """Makes a region in its own forward, which torch switches off."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_loop.mlp()

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cuda"):
            return self.layers(x)


def region_in_forward(watch: Watch) -> Any:
    return small_loop.train(watch, OwnRegion())


def unscaled(watch: Watch) -> None:
    model = small_loop.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch(model)
    for step in range(small_loop.STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = small_loop.mse(model, small_loop.make_batch()[0], torch.zeros(small_loop.BATCH, small_loop.WIDTH))
        (loss * 1e38 * (small_loop.GAIN if step == small_loop.POISONED else 1e-38)).backward()
        optimizer.step()


LOOPS: dict[str, Callable[[Watch], Any]] = {
    "small": small,
    "small traced": small_traced,
    "small healed": small_healed,
    "accumulated and clipped": accumulated_and_clipped,
    "without a scaler": unscaled,
    "with a closure": with_closure,
    "beside another model": beside_another,
    "handed and scheduled": handed_and_scheduled,
    "a region in forward": region_in_forward,
    "handwritten loss": handwritten_loss.train,
}
