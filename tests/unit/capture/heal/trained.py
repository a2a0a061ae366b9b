"""Small trainings that go bad, and their twins in which the same was done by hand, for tests of healing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.support.training.small_loop import WIDTH, make_batch

STEPS, BAD_STEP = 6, 3
SCALE = 2.0**8


class Doubtful(nn.Module):
    """A layer whose sum, while it is ``armed``, does not fit half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.second(x * 2.0**18) * 2.0**-18 if self.armed else self.second(x))


class Squares(nn.Module):
    """Squares what it converts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + (x.half() * 2.0**12).square() / 2.0**24 if self.armed else x
        return self.last(x)


class Shifted(nn.Module):
    """Adds a running mean."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            self.mean.lerp_(x.float().mean(0), 0.1)
        return self.last(x - self.mean)


Before = Callable[[Any, int], None]


def arm(model: Any, step: int) -> None:
    model.armed = step == BAD_STEP


def poison(model: Any, step: int) -> None:
    if step == BAD_STEP:
        model.mean[0] = torch.nan


def spoil(step: int, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """NaN in the batch of the bad step."""
    x, y = batch
    if step == BAD_STEP:
        x[1, 2] = torch.nan
    return x, y


def ruin(step: int, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Nothing but NaN in the batch of the bad step."""
    x, y = batch
    return (x * torch.nan, y) if step == BAD_STEP else batch


def trained(
    model: Any,
    watch: Callable[..., object],
    *,
    scaled: bool = True,
    clips: bool = False,
    before: Before = arm,
    batch: Callable[[int, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]] = lambda _, given: given,
    steps: int = STEPS,
    lr: float = 0.01,
    **options: Any,
) -> dict[str, Any]:
    """The loop of the recipe; returns its state."""
    dtype = torch.float16 if scaled else torch.bfloat16
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, **{"init_scale": SCALE, **options})
    watch(model, scaler)
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        x, y = batch(step, make_batch())
        before(model, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    return {**state, "losses": losses}


def made(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind()
