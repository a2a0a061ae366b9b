"""A loop on an accelerator is trained to the same bits, and its bad step is replayed there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampscope.trace.schema import Table
from tests.support.training.accelerator import fake_device
from tests.support.training.small_loop import BATCH, POISONED, STEPS, WIDTH, mse, poison
from tests.support.training.twin_runs import EXACT, train_both

pytestmark = pytest.mark.accelerator


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def train(watch: Callable[..., object], *, device: str = fake_device.TYPE, fused: bool = False) -> list[Any]:
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=2)
    watch(model, scaler)
    losses = []
    for step in range(STEPS):
        x, y = torch.randn(BATCH, WIDTH).to(device), torch.randn(BATCH, WIDTH, device=device)
        optimizer.zero_grad()
        with torch.autocast(fake_device.TYPE, dtype=torch.float16):
            loss = mse(model, x, y)
        poison(step, scaler.scale(loss)).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return [model, optimizer, scaler, losses]


@pytest.mark.parametrize("latency", [0, fake_device.NEVER], ids=["at once", "later"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("device", ["fake", "fake:1"])
def test_it_is_trained_to_the_same_bits(device: str, fused: bool, latency: int, run_folder: Path) -> None:
    with fake_device.latency(latency):
        watched = train_both(partial(train, device=device, fused=fused), run_folder)
    assert [row.skipped for row in watched.steps] == [step == POISONED for step in range(STEPS)]
    assert watched.replay_of(POISONED) == EXACT
    assert watched.warnings == []


def test_what_it_does_is_recorded_as_on_the_host(run_folder: Path) -> None:
    watched = train_both(train, run_folder)
    sites = {row.site: row for row in watched.run.rows(Table.SITES)}
    (first, *_) = (row for row in watched.run.rows(Table.OPS, step=0) if sites[row.site].op == "aten.addmm.default")
    assert (sites[first.site].module, sites[first.site].autocast) == ("0", "float16")
