"""Worker processes of a data loader are forked from a watched training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.training.small_loop import BATCH, WIDTH, make_scaler, mlp, mse
from tests.support.training.twin_runs import train_both


@pytest.mark.parametrize("when", ["for the loop", "inside a step"])
def test_worker_processes_of_a_data_loader(when: str, run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        model = mlp()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        watch(model, scaler)
        data = TensorDataset(torch.randn(3 * BATCH, WIDTH), torch.randn(3 * BATCH, WIDTH))
        total = torch.zeros(())
        if when == "inside a step":
            total = total + model(data.tensors[0]).mean()
        for x, y in DataLoader(data, BATCH, num_workers=1, multiprocessing_context="fork"):
            with torch.autocast("cpu", dtype=torch.float16):
                total = total + mse(model, x, y)
            if when == "for the loop":
                optimizer.zero_grad()
                scaler.scale(total).backward()
                scaler.step(optimizer)
                scaler.update()
                total = torch.zeros(())
        if when == "inside a step":
            scaler.scale(total).backward()
            scaler.step(optimizer)
            scaler.update()
        return [model, scaler]

    watched = train_both(loop, run_folder)
    assert watched.run.status == "closed"
    assert len(watched.steps) == (3 if when == "for the loop" else 1)
    assert watched.warnings == []
