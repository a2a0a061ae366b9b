"""A model with everything it takes to train it, which a test trains step by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.training.small_loop import BATCH, WIDTH, make_scaler, mse
from tests.support.training.small_models import TwoLayers


class TrainingLoop:
    """A model with everything it takes to train it."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model or TwoLayers()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.scaler = make_scaler()

    def loss(self) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return mse(self.model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.scaler.scale(self.loss()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def parts(self) -> tuple[Any, ...]:
        return self.model, self.scaler, self.optimizer
