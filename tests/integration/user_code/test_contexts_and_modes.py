"""The user's own contexts, torch modes and default device around the forward of a watched model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ampscope
from tests.support.training.small_loop import BATCH, POISONED, WIDTH, mlp, mse, train
from tests.support.training.twin_runs import EXACT, train_both


class Functions(TorchFunctionMode):
    """Counts the torch functions it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    """Counts the ops it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


CONTEXTS: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.device("cpu"),
    "flops": lambda: FlopCounterMode(display=False),
    "function mode": Functions,
    "dispatch mode": Dispatches,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(False),
    "offloading": torch.autograd.graph.save_on_cpu,
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "profiler": lambda: torch.autograd.profiler.record_function("forward"),
    "no function subclasses": torch._C.DisableTorchFunctionSubclass,
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("reach", ["forward", "forward and loss"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_around_the_forward(name: str, reach: str, run_folder: Path) -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(CONTEXTS[name]())
            out = model(x)
            if reach == "forward":
                stack.close()
            return F.mse_loss(out, y)

    watched = train_both(lambda watch: train(watch, mlp(), forward), run_folder)
    assert watched.replay_of(POISONED) == EXACT
    assert watched.warnings == []


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("mode", [Functions, Dispatches], ids=lambda mode: mode.__name__)
def test_a_mode_of_the_users_sees_what_it_sees_without_the_watch(mode: type, run_folder: Path) -> None:
    """Neither AMPscope's own functions and ops nor fewer of the user's."""
    seen: list[int] = []

    def loop(watch: Callable[..., object]) -> Any:
        counter = mode()
        seen.append(0)

        def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            with counter:
                loss = mse(model, x, y)
            seen[-1] = counter.seen
            return loss

        return train(watch, mlp(), forward)

    train_both(loop, run_folder)
    assert seen[0] == seen[1] > 0


@pytest.mark.parametrize("where", ["around the model", "between model and loss", "for the whole loop"])
def test_a_default_device(where: str, run_folder: Path) -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if where == "around the model":
            torch.set_default_device("cpu")
        out = model(x)
        torch.set_default_device(None if where == "around the model" else "cpu")
        loss = F.mse_loss(out, y)
        if where == "between model and loss":
            torch.set_default_device(None)
        return loss

    try:
        watched = train_both(lambda watch: train(watch, mlp(), forward), run_folder)
    finally:
        torch.set_default_device(None)
    assert watched.replay_of(POISONED) == EXACT


@pytest.mark.parametrize("carries", [False, True])
def test_a_loop_is_listened_to_between_its_steps_only_where_it_carries_something(
    carries: bool, run_folder: Path
) -> None:
    """The scale, which a scaler carries for every loop, is none of that."""
    heights: list[int] = []
    center = torch.zeros(BATCH, WIDTH)

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        heights.append(torch._C._len_torch_function_stack())
        out = model(x)
        loss = F.mse_loss(out - center if carries else out, y)
        if carries:
            center.lerp_(out.detach().float(), 0.1)
        return loss

    with contextlib.ExitStack() as closing:
        train(
            lambda model, scaler: closing.enter_context(ampscope.watch(model, scaler, dir=run_folder, quiet=True)),
            mlp(),
            forward,
            steps=21,
        )
    assert heights[13:16] == heights[18:] == [int(carries)] * 3, "neither among the first steps, nor after the bad one"
