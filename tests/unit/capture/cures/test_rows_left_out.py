"""A batch some of whose rows came in not finite, without these rows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ampscope
from ampscope.trace.read.run import open_run
from ampscope.trace.schema import Change, Form, ReplayRow, Table, Trial

ROWS = 4


class Scores(nn.Module):
    """A weight and a buffer with as many rows as the batch."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, ROWS)
        self.register_buffer("bias", torch.ones(ROWS))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.bias


def trained(run: Path, model: nn.Module, x: Tensor, target: Tensor, weight: Tensor | None = None) -> list[ReplayRow]:
    """One step; the replays of it in which rows were left out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ampscope.watch(model, dir=run, quiet=True):
        loss = functional.cross_entropy(model(x), target, weight)
        loss.backward()
        optimizer.step()
    rows = open_run(run).rows(Table.REPLAYS)
    return [row for row in rows if row.change == Change.FORM and row.form == Form.ROWS_LEFT_OUT]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_step_without_its_bad_rows_is_that_of_the_others(run_folder: Path, bad: float) -> None:
    torch.manual_seed(0)
    model, x, target = Scores(), torch.randn(ROWS, 8), torch.tensor([0, 1, 2, 3])
    by_hand = functional.cross_entropy(model(x[[0, 2, 3]]), target[[0, 2, 3]])
    x[1, 5] = bad
    (row,) = trained(run_folder, model, x, target)
    assert (row.outcome, row.form_call, row.form_file) == (Trial.FINITE, "", "")
    assert row.loss == pytest.approx(float(by_hand.detach()))
    first = ampscope.diagnose(run_folder).incidents[0].remedies[0]
    assert (first.verified, first.kind) == (True, Form.ROWS_LEFT_OUT)


def test_a_batch_of_nothing_but_bad_rows_is_left_as_it_is(run_folder: Path) -> None:
    x = torch.full((ROWS, 8), math.nan)
    assert trained(run_folder, Scores(), x, torch.zeros(ROWS, dtype=torch.long)) == []


def test_a_weight_of_the_loss_that_is_not_finite_has_no_rows_to_leave_out(run_folder: Path) -> None:
    weight = torch.tensor([1.0, math.nan])
    model = nn.Linear(8, 2)
    rows = trained(run_folder, model, torch.randn(ROWS, 8), torch.tensor([0, 1, 0, 1]), weight)
    assert [row.outcome for row in rows] == [Trial.UNAVAILABLE], "it could not be run, and says why"
    assert all(row.reason for row in rows)


def test_what_fails_on_its_own_is_no_matter_of_rows(run_folder: Path) -> None:
    class Root(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sqrt()

    assert trained(run_folder, Root(8, ROWS), torch.randn(ROWS, 8), torch.tensor([0, 1, 2, 3])) == []
