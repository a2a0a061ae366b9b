"""What a small mixed-precision loop is made of, and the watch that judges it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis, Finding
from tests.support.training.small_loop import here
from tests.support.training.twin_runs import Watched, train_both

WIDTH, BATCH, STEPS = 8, 16, 4
#: Makes gradients overflow float16 for one step, at the scale that a bench starts with.
OVERFLOW = 2.0**20

Watch = Callable[..., object]


class Bench:
    """A model, its optimizer, a scaler; random batches on demand."""

    def __init__(
        self,
        watch: Watch,
        *,
        scale: float = 4096.0,
        optimizer: Any = torch.optim.SGD,
        enabled: bool = True,
        **options: Any,
    ) -> None:
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        self.parameters = list(self.model.parameters())
        self.optimizer = optimizer(self.parameters, lr=1e-3, **options)
        self.scaler = torch.amp.GradScaler(here(), init_scale=scale, enabled=enabled)
        watch(self.model, self.scaler)

    @property
    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    @property
    def norm(self) -> Tensor:
        return torch.stack([gradient.norm() for gradient in self.gradients]).norm()

    def loss(self, sign: float = 1.0) -> Tensor:
        return loss_of(self.model, sign)

    def scaled(self, gain: float = 1.0) -> None:
        """Forward and backward of a scaled loss, from cleared gradients."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss() * gain).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def steps(self, count: int = STEPS) -> Iterator[int]:
        """Each time a backward has run; steps when the loop comes back for more."""
        for number in range(count):
            self.scaled()
            yield number
            self.step()

    @property
    def state(self) -> list[Any]:
        return [self.model, self.optimizer, self.scaler]


def loss_of(model: nn.Module, sign: float = 1.0) -> Tensor:
    with torch.autocast(here(), dtype=torch.float16):
        return nn.functional.mse_loss(model(torch.randn(BATCH, WIDTH)), sign * torch.ones(BATCH, 1))


def found_in(loop: Callable[[Watch], Any], folder: Path) -> tuple[Diagnosis, Watched]:
    """Trains ``loop`` under watch; torch may end it with an error of its own, which is what some mistakes lead to."""

    def until_refused(watch: Watch) -> Any:
        try:
            return loop(watch)
        except (RuntimeError, AssertionError, ValueError) as error:
            return [type(error).__name__]

    watched = Watched.train(until_refused, folder)
    assert watched.warnings == []
    return ampscope.diagnose(watched.run), watched


def findings_of(loop: Callable[[Watch], Any], folder: Path) -> tuple[Finding, ...]:
    """What is found in a loop that must come out the same without watch."""
    watched = train_both(loop, folder)
    assert watched.warnings == []
    return ampscope.diagnose(watched.run).findings
