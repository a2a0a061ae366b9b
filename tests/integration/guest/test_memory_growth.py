"""A training in which every third step goes wrong takes no more memory after thirty incidents than after ten."""

from __future__ import annotations

import ctypes
import functools
import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import ampscope
from ampscope.trace.schema import Table
from tests.support.training.injuries.soak import Record, soaked
from tests.support.training.small_loop import GAIN, make_scaler

WIDTH, BATCH = 256, 256
EARLY, INCIDENTS = 10, 30
#: Bytes that may come with twenty incidents: a tenth of what one replay's results take.
_MOST = 8 << 20


def resident() -> int:
    """Bytes of this process's memory, without what its allocator keeps for later."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_incidents_leave_no_memory_behind(run_folder: Path, record_property: Record) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-4), make_scaler()
    scope = ampscope.watch(model, scaler, dir=run_folder, quiet=True, overhead=1.0, replay_budget=3)
    step = functools.partial(_step, model, optimizer, scaler)
    with scope:
        for number in range(3 * EARLY):
            step(number)
        before = resident()
        for number in range(3 * EARLY, 3 * INCIDENTS):
            step(number)
        after = resident()
    with ampscope.open_run(run_folder) as run:
        assert len(run.rows(Table.INCIDENTS)) == INCIDENTS
    soaked(record_property, f"incidents ({(after - before) / 2**20:+.1f} MiB in the last twenty)", INCIDENTS, 0)
    assert after - before < _MOST


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, number: int) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(BATCH, WIDTH)).square().mean()
    (scaler.scale(loss) * (GAIN if number % 3 == 2 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
