"""The loop of the PyTorch AMP recipe: autocast, GradScaler, a network with dropout and BatchNorm.

Data is made up, preparation is not: samples are shuffled with numpy and flipped with Python's ``random``, as many
loops do, so that all three random streams matter. The default scale of 65536 is too large for the first gradients:
the scaler skips and calibrates, which is healthy.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from tests.integration.loops.trained import Trained, Watch, seed_everything
from tests.support.training.small_loop import here


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 1),
    )


def make_data(count: int = 256) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 16)
    y = 10.0 * x[:, :4].sum(1, keepdim=True) + x[:, 4:5] ** 2 + torch.randn(count, 1)
    return x, y


def train(watch: Watch | None = None, *, epochs: int = 4, batch_size: int = 32, seed: int = 0) -> Trained:
    seed_everything(seed)
    inputs, targets = make_data()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(here(), growth_interval=10)
    if watch is not None:
        watch(model, scaler)
    losses: list[float] = []
    skipped: list[int] = []
    model.train()
    for _epoch in range(epochs):
        order = np.random.permutation(len(inputs))
        for batch in np.split(order, len(inputs) // batch_size):
            x, y = inputs[batch], targets[batch]
            if random.random() < 0.5:
                x = x.flip(0)
                y = y.flip(0)

            optimizer.zero_grad()
            with torch.autocast(here(), dtype=torch.float16):
                output = model(x)
                loss = nn.functional.mse_loss(output, y)
            scaler.scale(loss).backward()
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()

            if scaler.get_scale() < scale:
                skipped.append(len(losses))
            losses.append(loss.item())
    return Trained(model, optimizer, scaler, losses, skipped)
