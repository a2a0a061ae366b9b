"""While the loop captures a CUDA graph nothing of AMPscope runs: every entry passes its call on, and says so once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture.step.own_work import CAPTURED
from ampscope.trace.schema import ReplayStatus
from tests.support.training.small_loop import BATCH, GAIN, WIDTH, make_scaler
from tests.support.training.small_models import TwoLayers
from tests.support.training.twin_runs import Watched, train_both


class FakeCuda:
    """A CUDA in use, of which nothing may be asked while a stream is capturing."""

    def __init__(self) -> None:
        self.capturing = False
        self.captured: list[str] = []

    def get_rng_state(self, device: torch.device) -> Tensor:
        assert not self.capturing
        return torch.zeros(16, dtype=torch.uint8)

    @contextlib.contextmanager
    def graph(self) -> Iterator[None]:
        """Captures the body: notes every op that runs in it."""
        self.capturing = True
        try:
            with _Captured(self.captured):
                yield
        finally:
            self.capturing = False


class _Captured(TorchDispatchMode):
    def __init__(self, ops: list[str]) -> None:
        super().__init__()
        self._ops = ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_rng_state", fake.get_rng_state)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    return fake


class _Loop:
    """Eager steps, one of them bad, and something captured on the way."""

    def __init__(self, watch: Callable[..., object], *, early: bool = False) -> None:
        self.model = TwoLayers()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.scaler = make_scaler()
        self.early = early
        watch(self.model, self.scaler)

    def step(self, gain: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss() * gain).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def loss(self) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return F.mse_loss(self.model(torch.ones(BATCH, WIDTH)).float(), torch.rand(BATCH, WIDTH))

    def whole_step(self) -> None:
        """What is captured: forward, loss, scaling, backward, and an optimizer that steps inside the graph."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.optimizer.step()
        F.dropout(torch.ones(4))

    def closure_step(self) -> None:
        torch.optim.LBFGS(self.model.parameters(), lr=0.0, max_iter=1).step(self.closure)

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def state(self) -> Any:
        return [self.model, self.optimizer, self.scaler]


def between_steps(cuda: FakeCuda) -> Callable[[Callable[..., object]], Any]:
    def run(watch: Callable[..., object]) -> Any:
        loop = _Loop(watch)
        for step in range(6):
            if step == 2:
                with cuda.graph():
                    loop.whole_step()
                    loop.closure_step()
            loop.step(GAIN if step == 4 else 1.0)
        return loop.state()

    return run


def within_a_step(cuda: FakeCuda) -> Callable[[Callable[..., object]], Any]:
    def run(watch: Callable[..., object]) -> Any:
        loop = _Loop(watch)
        for step in range(6):
            loop.optimizer.zero_grad()
            loss = loop.loss()
            if step == 3:
                with cuda.graph():
                    loss = loss + loop.loss() * GAIN
            loop.scaler.scale(loss * (GAIN if step == 5 else 1.0)).backward()
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
        return loop.state()

    return run


def from_the_start(cuda: FakeCuda) -> Callable[[Callable[..., object]], Any]:
    def run(watch: Callable[..., object]) -> Any:
        loop = _Loop(watch)
        for _ in range(3):
            with cuda.graph():
                loop.whole_step()
        return loop.state()

    return run


@pytest.mark.parametrize("loop", [between_steps, within_a_step, from_the_start])
def test_a_graph_holds_what_it_holds_unwatched(
    loop: Callable[[FakeCuda], Callable[..., Any]], cuda: FakeCuda, run_folder: Path
) -> None:
    watched = train_both(loop(cuda), run_folder)
    half = len(cuda.captured) // 2
    assert half
    assert cuda.captured[:half] == cuda.captured[half:]
    assert watched.warnings == [CAPTURED]


def test_what_is_captured_is_no_step_and_later_ones_are_replayed(cuda: FakeCuda, run_folder: Path) -> None:
    watched = train_both(between_steps(cuda), run_folder)
    assert len(watched.steps) == 6
    assert watched.replay_of(4) == (ReplayStatus.EXACT, "")


def test_a_step_of_which_a_part_is_captured_says_so(cuda: FakeCuda, run_folder: Path) -> None:
    watched = train_both(within_a_step(cuda), run_folder)
    status, reason = watched.replay_of(3)
    assert (status, reason) == (ReplayStatus.UNAVAILABLE, "a part of the step was captured into a CUDA graph")
    assert watched.replay_of(5) == (ReplayStatus.EXACT, "")


def test_a_process_without_cuda_is_not_asked(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> bool:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)

    def run(watch: Callable[..., object]) -> Any:
        loop = _Loop(watch)
        loop.step()
        loop.whole_step()
        return loop.state()

    assert Watched.train(run, run_folder).warnings == []
