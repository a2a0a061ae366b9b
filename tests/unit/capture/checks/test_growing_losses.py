"""A step whose loss has just grown by far: which smaller step of its optimizer lowers the loss of its own batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Form, ReplayRow, Table
from ampscope.trace.vocabulary import Cause
from tests.support.primary import primary_incident

Optimizer = torch.optim.Optimizer


class Curved(nn.Module):
    """Two layers whose curvature grows with their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


def batches(count: int, size: float) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 1, generator=generator)
    for step in range(count):
        x = torch.randn(16, 8, generator=generator) * (size if step == 3 else 2.0)
        yield x, 3.0 * x @ weight


def trained(
    run: Path | None, optimizer: type[Optimizer] = torch.optim.SGD, *, size: float = 2.0, **settings: Any
) -> dict[str, Tensor]:
    """Some steps of float16 autocast; of the fourth batch the values may be larger."""
    torch.manual_seed(0)
    model = Curved()
    steps = optimizer(model.parameters(), **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    scope = ampscope.watch(model, scaler, dir=run, quiet=True) if run is not None else None
    for x, y in batches(6, size):
        steps.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(steps)
        scaler.update()
    if scope is not None:
        scope.close()
    return model.state_dict()


def tried(run: Path) -> list[ReplayRow]:
    kinds = (Form.SMALLER_STEP, Form.CLIPPED)
    return [row for row in open_run(run).rows(Table.REPLAYS) if row.form in kinds]


def test_the_smaller_step_that_lowers_the_loss_is_the_remedy(run_folder: Path) -> None:
    trained(run_folder, lr=1.0)
    found = primary_incident(open_run(run_folder))
    assert found.cause is Cause.DIVERGENCE
    assert [(each.kind, each.verified) for each in found.remedies[:2]] == [
        (Form.SMALLER_STEP, True),
        (Form.CLIPPED, True),
    ]
    assert all(each.verified is not None for each in found.remedies)
    assert all(row.step < found.step for row in tried(run_folder))
    assert "lowers the loss of its own batch with a learning rate of" in ampscope.diagnose(run_folder).summary


def test_what_it_says_is_what_the_smaller_step_would_have_given(run_folder: Path) -> None:
    """The twin: the same training up to that step, which is made by hand with the rate that was tried."""
    trained(run_folder, lr=1.0)
    row = next(row for row in tried(run_folder) if row.form == Form.SMALLER_STEP)
    torch.manual_seed(0)
    model = Curved()
    given = list(batches(6, 2.0))
    losses: list[float] = []
    for x, y in given[: row.step + 1]:
        steps = torch.optim.SGD(model.parameters(), lr=(row.form_value or 0.0) if len(losses) == row.step else 1.0)
        steps.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(x), y)
        (loss * 0.5).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 0.5
        steps.step()
        losses.append(loss.item())
    with torch.autocast("cpu", torch.float16):
        after = nn.functional.mse_loss(model(given[row.step][0]), given[row.step][1])
    assert row.loss == pytest.approx(after.item(), rel=1e-3)
    assert row.loss is not None
    assert row.loss < losses[-1]


QUIET: dict[str, dict[str, Any]] = {
    "a rate that fits": {"lr": 1e-3},
    "a batch of larger values, whose loss the step lowers": {"lr": 1e-5, "size": 60.0},
    "an optimizer that bounds its steps": {"optimizer": torch.optim.Adam, "lr": 1e-3, "size": 60.0},
}


@pytest.mark.parametrize("name", QUIET)
def test_nothing_is_said_where_the_step_lowers_its_loss(name: str, run_folder: Path) -> None:
    trained(run_folder, **QUIET[name])
    assert not tried(run_folder)


@pytest.mark.parametrize(("optimizer", "rate"), [(torch.optim.SGD, 1.0), (torch.optim.Adam, 10.0)])
def test_the_training_keeps_its_bits(optimizer: type[Optimizer], rate: float, run_folder: Path) -> None:
    settings: dict[str, Any] = {"lr": rate}
    watched, alone = trained(run_folder, optimizer, **settings), trained(None, optimizer, **settings)
    assert tried(run_folder)
    assert all(torch.equal(watched[name].nan_to_num(7.0), alone[name].nan_to_num(7.0)) for name in alone)
