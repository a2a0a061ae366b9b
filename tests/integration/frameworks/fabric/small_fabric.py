"""A loop with Fabric as its guide shows it: a model, two micro-batches or one, a scaler where the precision has one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

import ampscope

WIDTH = 16
CLASSES = 4
STEPS = 8
#: The step that a batch breaks, and what its inputs are multiplied with.
BAD = 5
LARGE = 3000.0


class Net(nn.Module):
    """Squares its hidden values; a step of its own, as a LightningModule has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 32)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        squared = hidden * hidden
        return self.last(self.drop(squared))

    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)


def fabric(precision: str, **options: Any) -> Fabric:
    """A Fabric on the CPU; ``16-mixed`` has a scaler that works there."""
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    else:
        options["precision"] = precision
    return Fabric(**{"accelerator": "cpu", "devices": 1, **options})


def loss_outside(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss in the loop."""
    return F.cross_entropy(model(x), y)


def loss_inside(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss by the model's own step, which Fabric sends through its forward where there are several ranks."""
    loss: Tensor = model.training_step(x, y)
    return loss


def train(
    made: Fabric,
    watch: Callable[[Fabric, Any], contextlib.AbstractContextManager[ampscope.Scope | None]],
    *,
    bad: float = 1.0,
    micro_batches: int = 1,
    loss_of: Callable[[Any, Tensor, Tensor], Tensor] = loss_outside,
    clips_itself: bool = False,
) -> list[Tensor]:
    """Trains a small net, the batch of step `BAD` multiplied with ``bad``; its weights afterwards.

    ``clips_itself``: with torch, before Fabric unscales.
    """
    torch.manual_seed(0)
    net = Net()
    model, optimizer = made.setup(net, torch.optim.AdamW(net.parameters(), 1e-3))
    torch.manual_seed(1 + made.global_rank)
    with watch(made, model):
        for step in range(STEPS):
            for _ in range(micro_batches):
                x, y = torch.randn(8, WIDTH) * (bad if step == BAD else 1.0), torch.randint(0, CLASSES, (8,))
                made.backward(loss_of(model, x, y) / micro_batches)
            if clips_itself:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            made.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
    return [weight.detach().clone() for weight in net.parameters()]


def unwatched(made: Fabric, model: Any) -> contextlib.AbstractContextManager[None]:
    """For `train`: watches nothing."""
    return contextlib.nullcontext()


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether all tensors are the same, bit for bit."""
    return [each.numpy().tobytes() for each in one] == [each.numpy().tobytes() for each in other]
