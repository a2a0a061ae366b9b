"""Training goes on after the user's exceptions in forward, backward and the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope.trace.schema import ReplayStatus
from tests.support.training.small_loop import BATCH, POISONED, WIDTH, make_scaler, mlp, mse, poison, train
from tests.support.training.twin_runs import EXACT, Watched, train_both


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        out = self.inner(x)
        if fail:
            raise ValueError("on purpose")
        return out


class DeviceError(nn.Module):
    """Stands for a call that a device failed in."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.inner, self.calls, self.error = mlp(), 0, error

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == POISONED:
            raise self.error
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_device_reaches_the_users_clause_as_it_is(error: Exception, run_folder: Path) -> None:
    caught: list[Exception] = []

    def loop(watch: Callable[..., object]) -> Any:
        try:
            train(watch, DeviceError(error))
        except type(error) as met:  # as a loop that frees memory and goes on has it
            caught.append(met)

    watched = Watched.train(loop, run_folder)
    assert caught == [error]
    assert watched.warnings == []


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ValueError("on purpose")


def test_training_goes_on_after_exceptions_in_forward(run_folder: Path) -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            model(x, fail=True)
        return F.mse_loss(model(x), y)

    watched = train_both(lambda watch: train(watch, Failing(), forward), run_folder)
    assert watched.replay_of(POISONED) == EXACT
    assert [row.loss for row in watched.steps] == pytest.approx(watched.state["losses"], rel=1e-6)


def test_training_goes_on_after_exceptions_in_backward(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        taken = 0
        for number in range(2 * POISONED):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(BATCH, WIDTH))
                loss = F.mse_loss(Boom.apply(out) if number % 3 == 1 else out, torch.randn(BATCH, WIDTH))
            try:
                poison(taken, scaler.scale(loss)).backward()
            except ValueError:
                continue
            scaler.step(optimizer)
            scaler.update()
            taken += 1
        return [model, optimizer, scaler, taken]

    watched = train_both(loop, run_folder)
    assert len(watched.steps) == watched.state[-1]
    status, reason = watched.replay_of(POISONED)
    assert (status, reason) == EXACT or (status == ReplayStatus.UNAVAILABLE and "exception" in reason)


def test_training_goes_on_after_exceptions_in_the_optimizer(run_folder: Path) -> None:
    class Stumbling(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise ValueError("on purpose")
            return super().step(closure)

    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer, scaler = Stumbling(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        for step in range(POISONED + 2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
            poison(step, scaler.scale(loss)).backward()
            with contextlib.suppress(ValueError):
                scaler.step(optimizer)
            scaler.update()
        return [model, optimizer, scaler]

    watched = train_both(loop, run_folder)
    (incident,) = watched.incidents
    assert incident.replay == ReplayStatus.EXACT
    assert watched.warnings == []
