"""How far a replay can be trusted where gradients are reduced: this rank's own are those before the reduction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampscope
from ampscope.trace.evidence import Evidence
from ampscope.trace.schema import IncidentRow, ReplayStatus, Source, Table
from tests.support.training.small_loop import make_scaler, mlp

pytestmark = pytest.mark.usefixtures("alone")

STEPS, BAD = 8, 5


def receives(state: list[int], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that brings an inf in the step `BAD`, as from another rank."""
    state[0] += 1
    if state[0] == BAD + 1:
        bucket.buffer()[0] = float("inf")
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


receives.__annotations__.clear()  # torch compares them with classes, and they are text here


CALLS = [0]


class Doubts(nn.Module):
    """Gives another output each time it is called with the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(0)
        return self.inner(x) + 1e-3 * len(CALLS)


def train(folder: Path, inner: nn.Module, *, bad_loss: bool = False, zeroed: bool = False) -> ampscope.Run:
    torch.manual_seed(0)
    model = DistributedDataParallel(inner)
    model.register_comm_hook([0], receives)
    scaler, optimizer = make_scaler(), torch.optim.SGD(model.parameters(), 0.01)
    with ampscope.watch(model, scaler, dir=folder, quiet=True):
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=not zeroed)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(4, 8)).float().square().mean()
            loss = loss * float("inf") if bad_loss and step == BAD else loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return ampscope.open_run(folder)


def incident(run: ampscope.Run) -> IncidentRow:
    (row,) = run.rows(Table.INCIDENTS)
    assert row.step == BAD
    return row


@pytest.mark.parametrize("zeroed", [False, True], ids=["no gradients before", "gradients of zeros before"])
def test_what_came_through_the_reduction_is_received(zeroed: bool, run_folder: Path) -> None:
    run = train(run_folder, mlp(), zeroed=zeroed)
    row = incident(run)
    assert row.replay == ReplayStatus.RECEIVED
    assert "DistributedDataParallel sent them to the other ranks through receives" in row.replay_reason
    reduction = Evidence.of(row).reduction
    assert reduction is not None
    assert (reduction.hook, reduction.dtype, reduction.overflows) == ("receives", "float32", False)
    assert 0 < reduction.largest < 1e6
    assert run.rows(Table.REPLAYS) == [], "nothing that this rank does otherwise cures it"
    assert run.rows(Table.OPS, source=Source.REPLAY) == [], "its ops are all finite"


def test_a_loss_of_its_own_is_not_received(run_folder: Path) -> None:
    assert incident(train(run_folder, mlp(), bad_loss=True)).replay == ReplayStatus.EXACT


def test_a_replay_that_comes_out_otherwise_proves_nothing(run_folder: Path) -> None:
    row = incident(train(run_folder, Doubts()))
    assert row.replay == ReplayStatus.DIVERGED
    assert "differs" in row.replay_reason
    assert "its gradients were reduced across ranks" in row.replay_reason
