"""A signal that comes while AMPscope runs: what its handler raises reaches the loop, and the training can go on."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ampscope
from ampscope.capture.torch_support import torch_private
from tests.support.training.injuries.interrupting import Interrupting
from tests.support.training.small_loop import BATCH, WIDTH, make_scaler, mse, poison
from tests.support.training.torch_state import installed, settings
from tests.support.training.twin_runs import seed_everything

STEPS = 5
#: The first line at which a run is interrupted, and how many lie between one and the next.
FIRST, APART = 211, 97_001


class Preempted(Exception):
    """What the user's program tells itself by a signal."""


class Functions(TorchFunctionMode):
    """A mode of the user's, in which all trains."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    """Another."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def preempted() -> Iterator[None]:
    def handler(*_: Any) -> None:
        raise Preempted

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)
    torch.set_grad_enabled(True)  # the next test must not suffer for one that fails here


def training(watch: Callable[..., object], interrupting: Interrupting) -> tuple[int, int]:
    """Trains, leaving out a step that is interrupted; returns how many were, and how many were completed."""
    seed_everything()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
    watch(model, scaler)
    interrupted = completed = 0
    with interrupting, Functions() as functions, Ops() as ops:
        for step in range(STEPS):
            try:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
                poison(step, scaler.scale(loss)).backward()
                scaler.step(optimizer)
                scaler.update()
                completed += 1
            except (Preempted, KeyboardInterrupt):
                interrupted += 1
                assert functions in torch_private.function_modes(), interrupting.where
                assert ops in torch_private.dispatch_modes(), interrupting.where
                scaler = make_scaler()
    return interrupted, completed


def interrupted_at(line: int, folder: Path, interrupt: Callable[[], object], **options: Any) -> Interrupting:
    """A run that is interrupted there; asserts that nothing but the step is lost by it."""
    interrupting, before = Interrupting(line, interrupt), (installed(), settings())
    scopes: list[ampscope.Scope] = []

    def watch(model: nn.Module, scaler: Any) -> None:
        scopes.append(ampscope.watch(model, scaler, dir=folder, quiet=True, **options))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            interrupted, completed = training(watch, interrupting)
        finally:
            scopes[0].close()
    assert interrupted == (interrupting.where is not None), interrupting.where
    assert completed == STEPS - interrupted
    assert (installed(), settings()) == before, interrupting.where
    return interrupting


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> int:
    return interrupted_at(0, tmp_path_factory.mktemp("run") / "run", lambda: None).lines


def ctrl_c() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["handler", "ctrl+c"])
def test_it_reaches_the_loop(kind: str, lines: int, tmp_path: Path) -> None:
    interrupt = ctrl_c if kind == "ctrl+c" else lambda: signal.raise_signal(signal.SIGUSR1)
    met = 0
    for line in range(FIRST, lines, APART):
        run = interrupted_at(line, tmp_path / str(line), interrupt)
        met += run.where is not None
    assert met
