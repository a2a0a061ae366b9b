"""A short training loop under fp16 autocast with a scaler, one of whose steps goes bad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8
BATCH = 4
#: The step whose gradients overflow fp16, so that the scaler skips it and it is replayed. Its loss stays finite and
#: keeps all its bits, so that a replay that computes something else cannot hide behind a NaN.
POISONED = 3
GAIN = 2.0**20
STEPS = 6

Forward = Callable[[nn.Module, Tensor, Tensor], Tensor]
Model = TypeVar("Model", bound=nn.Module)


def make_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def poison(step: int, scaled: Tensor) -> Tensor:
    return scaled * (GAIN if step == POISONED else 1.0)


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def here() -> str:
    """The kind of device on which tensors are made, which the fixture ``device`` chooses."""
    return torch.get_default_device().type


def make_scaler(*, device: str = "", **options: Any) -> torch.amp.GradScaler:
    """Starts low enough not to have to calibrate."""
    return torch.amp.GradScaler(device or here(), **{"init_scale": 2.0**8, "growth_interval": 2, **options})


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def train(
    watch: Callable[..., object],
    model: Model,
    forward: Callable[[Model, Tensor, Tensor], Tensor] = mse,
    *,
    steps: int = STEPS,
    parameters: Sequence[Tensor] | None = None,
    keep: object = None,
) -> dict[str, Any]:
    """The loop of the recipe; returns its state, ``keep`` included."""
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.01, momentum=0.9)
    scaler = make_scaler()
    watch(model, scaler)
    losses = []
    for step in range(steps):
        x, y = make_batch()
        optimizer.zero_grad()
        with torch.autocast(here(), dtype=torch.float16):
            loss = forward(model, x, y)
        poison(step, scaler.scale(loss)).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return {"model": model, "optimizer": optimizer, "scaler": scaler, "losses": losses, "kept": keep}
