"""A short training whose unwatched end is known, for tests in which a part of AMPscope fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.training.model_parts import grad_of, linear
from tests.support.training.small_loop import BATCH, WIDTH, make_scaler, mse, poison
from tests.support.training.torch_state import global_hooks
from tests.support.training.twin_runs import train_unwatched

STEPS = 5


def training(watch: Callable[..., object]) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
    watch(model, scaler)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)) * 1.0
        poison(step, scaler.scale(loss)).backward()
        losses.append(grad_of(linear(model, "0").weight).norm().item())
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return [model, optimizer, scaler, losses]


@pytest.fixture(scope="module")
def unwatched_state() -> dict[str, bytes]:
    torch.set_num_threads(1)
    return train_unwatched(training)


@pytest.fixture
def modes_removed() -> Iterator[None]:
    """A test that fails here may leave something behind; the next one must not suffer for it."""
    yield
    leave_nothing()


def leave_nothing() -> None:
    """Takes away whatever a test has left: modes, hooks of every module, autocast switched on, grad mode off."""
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    for hooks in global_hooks().values():
        if isinstance(hooks, dict):
            hooks.clear()
    torch.set_autocast_enabled("cpu", False)
    torch.set_grad_enabled(True)
