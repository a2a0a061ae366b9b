"""The same loop written against ``torch.cuda.amp``, as thousands of older scripts are.

Both names are deprecated and warn; where there is no GPU they also switch themselves off, and training goes on in fp32.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.integration.loops.plain import make_data, make_model
from tests.integration.loops.trained import Trained, Watch, seed_everything


def train(watch: Watch | None = None, *, steps: int = 12, batch_size: int = 32, seed: int = 0) -> Trained:
    seed_everything(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs, targets = (part.to(device) for part in make_data())
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.cuda.amp.GradScaler()
    if watch is not None:
        watch(model, scaler)
    losses: list[float] = []
    skipped: list[int] = []
    for step in range(steps):
        first = step * batch_size % len(inputs)
        x, y = inputs[first : first + batch_size], targets[first : first + batch_size]
        optimizer.zero_grad()
        with torch.cuda.amp.autocast():
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped.append(step)
        losses.append(loss.item())
    return Trained(model, optimizer, scaler, losses, skipped)
