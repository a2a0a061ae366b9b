"""A watched model is evaluated at any time of a step, and the fast path of an evaluated transformer stays fast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.training.small_loop import BATCH, POISONED, WIDTH, make_scaler, mse, poison
from tests.support.training.twin_runs import EXACT, train_both


@contextlib.contextmanager
def evaluating(model: nn.Module, mode: Callable[[], Any]) -> Iterator[None]:
    model.eval()
    with mode():
        yield
    model.train()


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "with gradients": contextlib.nullcontext}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["between steps", "after forward", "after backward"])
def test_evaluation_at_any_time(mode: str, when: str, run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        losses, scores = [], []

        def evaluate(moment: str) -> None:
            if moment == when:
                with evaluating(model, MODES[mode]):
                    scores.append(model(torch.randn(BATCH, WIDTH)).sum().item())

        for step in range(POISONED + 2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
            evaluate("after forward")
            poison(step, scaler.scale(loss)).backward()
            evaluate("after backward")
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            evaluate("between steps")
        return [model, optimizer, scaler, losses, scores]

    watched = train_both(loop, run_folder)
    assert watched.replay_of(POISONED) == EXACT
    assert [row.loss for row in watched.steps] == pytest.approx(watched.state[-2], rel=1e-6)


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


@pytest.mark.parametrize("when", ["between steps", "after forward", "after backward"])
@pytest.mark.parametrize("seed", range(3))
def test_the_fast_path_of_an_evaluated_transformer_stays_fast(when: str, seed: int, run_folder: Path) -> None:
    """It is left when any torch function mode is active, and gives other bits then."""

    def loop(watch: Callable[..., object]) -> Any:
        torch.manual_seed(seed)
        model = _encoder()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch(model)
        outputs = []

        def evaluate(moment: str) -> None:
            if moment == when:
                with evaluating(model, torch.no_grad):
                    outputs.append(model(torch.randn(2, 5, 16)))

        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 5, 16)).pow(2).mean()
            evaluate("after forward")
            loss.backward()
            evaluate("after backward")
            optimizer.step()
            evaluate("between steps")
        return [model, outputs]

    train_both(loop, run_folder)


@pytest.mark.parametrize("seed", range(3))
def test_a_frozen_transformer_inside_the_model_stays_fast(seed: int, run_folder: Path) -> None:
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = _encoder(), nn.Linear(16, 1)
            self.encoder.requires_grad_(False).eval()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.encoder(x)
            return self.head(features)

    def loop(watch: Callable[..., object]) -> Any:
        torch.manual_seed(seed)
        model = Probe()
        optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
        watch(model)
        losses = []
        for step in range(POISONED + 1):
            optimizer.zero_grad()
            out = model(torch.randn(2, 5, 16))
            loss = out.pow(2).mean() + (torch.sqrt(out[0, 0, 0] * 0.0) if step == POISONED else 0.0)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return [model, losses]

    watched = train_both(loop, run_folder)
    assert watched.replay_of(POISONED) == EXACT


class _Pooled(nn.TransformerEncoder):
    """A subclass, whose forward hands on to the one that chooses."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs).mean(1, keepdim=True)


class _Asking(nn.Module):
    """Chooses by itself, as torch's modules do."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.overrides.has_torch_function((x,)):
            return x.sum(1)
        return x.flip(1).sum(1) * (1 + 2**-20)


class _Failing(_Asking):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise ValueError("no such batch")


class _Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]  # of one tensor
        return super().forward(x, x, x)[0]


TEACHERS: dict[str, Callable[[], nn.Module]] = {
    "encoder": _encoder,
    "encoder of nested tensors": lambda: _Pooled(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
    "attention": lambda: _Attention(16, 2, batch_first=True),
    "within another": lambda: nn.Sequential(nn.Linear(16, 16), _encoder(), nn.Linear(16, 16)),
    "of its own": _Asking,
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16))),
    "fails": _Failing,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("kind", TEACHERS)
def test_a_model_that_nobody_watches_is_evaluated_at_any_time(kind: str, run_folder: Path) -> None:
    """A teacher, a reward model or a metric's: what listens to the loop's calls is not there for it."""

    def loop(watch: Callable[..., object]) -> Any:
        model, teacher = nn.Linear(16, 16), TEACHERS[kind]().eval()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch(model)
        outputs, queue = [], torch.zeros(8, 16)

        def evaluate() -> None:
            x = torch.randn(2, 5, 16)
            with torch.no_grad():
                try:
                    outputs.append(teacher(x))
                except ValueError:
                    outputs.append(x * 0.5)

        for step in range(6):
            optimizer.zero_grad()
            loss = (model(torch.randn(2, 5, 16)) - queue.mean()).pow(2).mean()
            evaluate()
            loss.backward()
            evaluate()
            optimizer.step()
            evaluate()
            queue[step] = outputs[-1].reshape(-1, 16).mean(0)
        return [model, outputs, queue]

    train_both(loop, run_folder)
