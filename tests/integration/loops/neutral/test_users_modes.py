"""A dispatch mode and a function mode of the user's see the calls of an unwatched training, in order, and no others."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ampscope
from ampscope.trace.schema import EventKind, ReplayStatus, Table

STEPS, BAD, BATCH, WIDTH = 10, 6, 4, 6
Batches = Iterator[tuple[Tensor, Tensor]]
Loop = Callable[[nn.Module, torch.amp.GradScaler, Batches], None]


class Dispatches(TorchDispatchMode):
    """Notes every op."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Notes every torch function, and what is asked of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = getattr(func, "__self__", None)
        self.seen.append(f"{getattr(owner, '__name__', '')} {getattr(func, '__name__', func)}")
        return func(*args, **(kwargs or {}))


class Network(nn.Module):
    """Normalises by a batch, which writes buffers, and drops out, which draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.drop(self.norm(self.enter(x)).relu()))


def loss_of(model: nn.Module, x: Tensor, target: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with torch.autocast("cpu", dtype=dtype):
        return nn.functional.mse_loss(model(x), target)


def scaled(model: nn.Module, scaler: torch.amp.GradScaler, batches: Batches) -> None:
    """Clips by hand what it has unscaled."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for x, target in batches:
        scaler.scale(loss_of(model, x, target, torch.float16)).backward()
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-1, 1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def averaged(model: nn.Module, _: torch.amp.GradScaler, batches: Batches) -> None:
    """Without a scaler, writing in place into its loss, its gradients and an average of the model."""
    optimizer, average = torch.optim.SGD(model.parameters(), 1e-2), copy.deepcopy(model)
    for x, target in batches:
        loss = loss_of(model, x, target) * 2
        loss.div_(2)
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(weight, alpha=0.1)


def by_hand(model: nn.Module, _: torch.amp.GradScaler, batches: Batches) -> None:
    """Moves the weights itself, and keeps its last losses in a buffer."""
    losses = torch.zeros(3)
    for x, target in batches:
        loss = loss_of(model, x, target)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses[0] = loss.detach()
        losses.mul_(0.9)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient * 0.01)


def with_evaluation(model: nn.Module, _: torch.amp.GradScaler, batches: Batches) -> None:
    """Calls a layer that looks for modes, between its steps."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True).eval()
    for x, target in batches:
        with torch.no_grad():
            encoded = layer(x[None])[0]
        loss_of(model, x + 0 * encoded, target).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_closure(model: nn.Module, _: torch.amp.GradScaler, batches: Batches) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), 1e-2, max_iter=2)

    def evaluate(x: Tensor, target: Tensor) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, x, target)
        loss.backward()
        return loss

    for batch in batches:
        optimizer.step(partial(evaluate, *batch))


LOOPS = [scaled, averaged, by_hand, with_evaluation, with_closure]


def seen(loop: Loop, mode: Dispatches | Functions, folder: Path | None, every: int | None = None) -> list[str]:
    """What a mode sees that is active around a watch and its training."""
    torch.manual_seed(0)
    model, scaler = Network(), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    draws = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(BATCH, WIDTH, generator=draws), torch.randn(BATCH, 1, generator=draws)) for _ in range(STEPS)
    ]
    batches[BAD][0][0] = torch.inf
    with mode, contextlib.ExitStack() as stack:
        if folder is not None:
            given = (model, scaler) if loop is scaled else (model,)
            stack.enter_context(ampscope.watch(*given, dir=folder, quiet=True, every=every))
        loop(model, scaler, iter(batches))
    return mode.seen


@pytest.mark.parametrize("every", [None, 0, 1])
@pytest.mark.parametrize("mode", [Dispatches, Functions])
@pytest.mark.parametrize("loop", LOOPS)
def test_it_sees_the_same_calls(
    loop: Loop, mode: type[Dispatches | Functions], every: int | None, run_folder: Path
) -> None:
    alone = seen(loop, mode(), None)
    assert seen(loop, mode(), run_folder, every) == alone
    run = ampscope.open_run(run_folder)
    replays = {row.replay for row in run.rows(Table.INCIDENTS) if not row.over_budget}
    assert replays & {ReplayStatus.EXACT, ReplayStatus.DIVERGED}, "nothing was replayed that a mode might have seen"
    assert not run.rows(Table.EVENTS, kind=EventKind.WARNING)
