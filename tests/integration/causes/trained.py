"""A tiny model with one part that is told by each test, trained for a few steps and diagnosed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.analysis.results import Diagnosis

WIDTH, ROWS = 8, 4
#: The step whose batch differs from the others.
ODD = 2
STEPS = 5

Batch = tuple[Tensor, Tensor]


class Part(nn.Module):
    """Computes what a test says."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, h: Tensor) -> Tensor:
        return self.call(h)


class Net(nn.Module):
    """Three layers; the first hands the batch on as it is."""

    def __init__(self, part: nn.Module, *, outputs: int = 1) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.body.weight)
        self.part = part
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(self.body(x)))


def plain(h: Tensor) -> Tensor:
    return h


def same(x: Tensor) -> Tensor:
    return x


def smooth_l1(out: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(out, y)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How a model is trained."""

    part: Callable[[Tensor], Tensor] | type[nn.Module] = plain
    loss: Callable[[Tensor, Tensor], Tensor] = smooth_l1
    odd: Callable[[Tensor], Tensor] = same  #: what is done to the batch of step `ODD`
    odd_target: Callable[[Tensor], Tensor] = same
    outputs: int = 1
    prepare: Callable[[Net], object] = same  # type: ignore[assignment]  # any function of the model
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    lr: float = 1e-3
    dtype: torch.dtype = torch.float16
    scale: float | None = 16.0  #: None without a scaler
    steps: int = STEPS

    def batches(self) -> Sequence[Batch]:
        made = []
        for step in range(self.steps):
            x, y = torch.randn(ROWS, WIDTH), torch.ones(ROWS, 1)
            made.append((self.odd(x), self.odd_target(y)) if step == ODD else (x, y))
        return made

    def model(self) -> Net:
        part = self.part() if isinstance(self.part, type) else Part(self.part)
        net = Net(part, outputs=self.outputs)
        self.prepare(net)
        return net


def diagnosed(loop: Loop, folder: Path) -> Diagnosis:
    """Trains under `ampscope.watch` into ``folder`` and diagnoses the run."""
    torch.manual_seed(0)
    model = loop.model()
    half = next(model.parameters()).dtype
    optimizer = loop.optimizer(model.parameters(), lr=loop.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=loop.scale or 1.0, enabled=loop.scale is not None)
    with ampscope.watch(model, scaler, dir=folder, quiet=True):
        for x, y in loop.batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=loop.dtype, enabled=half is torch.float32):
                loss = loop.loss(model(x.to(half)), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return ampscope.diagnose(folder)
