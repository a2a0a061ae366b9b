"""A model that takes a logarithm, and batches at which that logarithm is one of 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.training.small_loop import BATCH, POISONED, WIDTH

CLASSES = 4


class LogMagnitude(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x.abs().mean(-1, keepdim=True))


def log_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), LogMagnitude(), nn.Linear(1, CLASSES))


def batch(*, empty: bool = False) -> tuple[Tensor, Tensor]:
    """An input and its classes; the logarithm of an ``empty`` input is -inf."""
    x, y = torch.randn(BATCH, WIDTH), torch.randint(0, CLASSES, (BATCH,))
    return (torch.zeros_like(x) if empty else x), y


def batch_of(step: int, *, bad: bool) -> tuple[Tensor, Tensor]:
    """The batch of a step; that of one step is empty in a run that is to go ``bad``."""
    return batch(empty=bad and step == POISONED)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)
