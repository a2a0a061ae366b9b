"""Layers, buffers and weights that the loop adds or exchanges while it trains: a replay knows them, and leaves them.

The exchange comes right before the bad step, and after the first ones, in which capture looks at the model anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope.trace.schema import ReplayStatus
from tests.support.training.small_loop import BATCH, POISONED, STEPS, WIDTH, make_batch, make_scaler, poison
from tests.support.training.twin_runs import EXACT, train_both

Surgery = Callable[[nn.Sequential], None]
SURGERIES: dict[str, Surgery] = {}


def surgery(change: Surgery) -> Surgery:
    """Registers a change of the model between two steps."""
    SURGERIES[change.__name__.replace("_", " ")] = change
    return change


class Block(nn.Module):
    """A layer that keeps state in every way there is."""

    seen: Tensor
    average: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.inner: nn.Module = nn.Identity()
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += x.detach().abs().mean()
        x = self.inner(self.linear(x)) + 0.01 * self.seen
        if self.average is not None:
            self.average.mul_(0.9).add_(x.detach().float().mean(0))
            x = x + self.average
        return x


class Adapted(nn.Module):
    """As LoRA does: a linear layer becomes a part of another one."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def block(model: nn.Sequential) -> Block:
    found = model[0]
    assert isinstance(found, Block)
    return found


@surgery
def a_layer_is_replaced(model: nn.Sequential) -> None:
    block(model).inner = nn.BatchNorm1d(WIDTH)


@surgery
def a_layer_is_wrapped(model: nn.Sequential) -> None:
    block(model).linear = Adapted(block(model).linear)


@surgery
def a_whole_block_is_replaced(model: nn.Sequential) -> None:
    model[0] = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH))


@surgery
def a_block_is_added(model: nn.Sequential) -> None:
    model.append(Block())


@surgery
def a_block_is_taken_away(model: nn.Sequential) -> None:
    del model[1]


@surgery
def a_buffer_is_registered_anew(model: nn.Sequential) -> None:
    block(model).register_buffer("seen", torch.ones(1))


@surgery
def a_tensor_is_kept_as_an_attribute(model: nn.Sequential) -> None:
    block(model).average = torch.zeros(WIDTH).fill_(0.5)


@surgery
def a_weight_is_replaced(model: nn.Sequential) -> None:
    linear = block(model).linear
    assert isinstance(linear, nn.Linear)
    linear.weight = nn.Parameter(linear.weight.detach() * 0.5)


@surgery
def layers_are_frozen(model: nn.Sequential) -> None:
    model[1].requires_grad_(requires_grad=False)


@surgery
def layers_are_thawed(model: nn.Sequential) -> None:
    model[2].requires_grad_()


def loop(watch: Callable[..., Any], change: Surgery, *, at: int) -> Any:
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
    watch(model, scaler, every=0)
    for step in range(STEPS):
        if step == at:
            change(model)
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
        optimizer.zero_grad()
        x, y = make_batch()
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x).float(), y)
        poison(step, scaler.scale(loss)).backward()
        scaler.step(optimizer)
        scaler.update()
    return [model, optimizer, scaler]


@pytest.mark.parametrize("at", [POISONED, POISONED - 1])
@pytest.mark.parametrize("name", SURGERIES)
def test_the_replay_after_an_exchange_is_exact_and_changes_nothing(name: str, at: int, run_folder: Path) -> None:
    watched = train_both(partial(loop, change=SURGERIES[name], at=at), run_folder)
    assert watched.replay_of(POISONED) == EXACT, "a new optimizer of the same weights goes on with their steps"
    assert (watched.findings, watched.warnings) == ([], [])


@pytest.mark.parametrize("name", [name for name in SURGERIES if name != "a tensor is kept as an attribute"])
def test_an_exchange_within_the_step_forbids_the_replay_or_leaves_it_exact(name: str, run_folder: Path) -> None:
    """Between backward and the optimizer's step: what ran is not what is there."""

    def exchanging(watch: Callable[..., Any]) -> Any:
        model = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        watch(model, scaler, every=0)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = make_batch()
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(model(x).float(), y)
            poison(step, scaler.scale(loss)).backward()
            if step == POISONED:
                SURGERIES[name](model)
            scaler.step(optimizer)
            scaler.update()
        return [model, optimizer, scaler]

    watched = train_both(exchanging, run_folder)
    status, reason = watched.replay_of(POISONED)
    assert (status, reason) == EXACT or (status == ReplayStatus.UNAVAILABLE and "replaced within the step" in reason)
    assert watched.warnings == []


class WithTeacher(nn.Module):
    """Keeps another model where torch does not look for layers."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(WIDTH, WIDTH)
        self.teacher = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher[0](x)
        return self.student(x) - target


def test_a_layer_that_the_model_does_not_list_is_left_as_it_was(run_folder: Path) -> None:
    def training(watch: Callable[..., Any]) -> Any:
        model = WithTeacher()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(BATCH, WIDTH)).square().mean()
            poison(step, scaler.scale(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
        return [model, model.teacher, optimizer]

    assert train_both(training, run_folder).replay_of(POISONED) == EXACT


def test_a_tensor_that_came_as_an_attribute_after_all_is_said_to_be_unknown(run_folder: Path) -> None:
    """One that took the place of None: nothing about the layer tells of it until it is looked at again."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.state is not None:
                self.state += 1
                x = x + self.state
            return self.linear(x)

    def training(watch: Callable[..., Any]) -> Any:
        model = Late()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        for step in range(STEPS):
            if step == POISONED:
                model.state = torch.zeros(WIDTH).add_(1)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(BATCH, WIDTH)).square().mean()
            poison(step, scaler.scale(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
        return [model, optimizer]

    status, reason = train_both(training, run_folder).replay_of(POISONED)
    assert status == ReplayStatus.UNAVAILABLE
    assert "the tensor state of Late" in reason
