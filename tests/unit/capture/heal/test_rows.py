"""Rows are left out of what is known to be the batch: a table may have as many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampscope
from ampscope.trace.schema import CureKind
from tests.support.training.small_loop import WIDTH, make_batch
from tests.support.training.twin_runs import exact_state
from tests.unit.capture.heal.told import cures
from tests.unit.capture.heal.trained import BAD_STEP, SCALE, STEPS

pytestmark = pytest.mark.usefixtures("strict_guards")


def train(watch: Callable[..., object], *, by_hand: bool = False) -> dict[str, Any]:
    """A loss with a factor that comes from a table with as many rows as the batch; ``by_hand`` makes no bad step."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    table = torch.randn(len(make_batch()[0]), 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    watch(model, scaler)
    torch.manual_seed(1)
    for step in range(STEPS):
        x, y = make_batch()
        if step == BAD_STEP:
            x[1, 2] = torch.nan
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x).float()
        loss = nn.functional.mse_loss(out, y) + table.square().mean() * out.square().mean()
        scaler.scale(loss).backward()
        if not (by_hand and step == BAD_STEP):
            scaler.step(optimizer)
            scaler.update()
    return exact_state(model.state_dict())


def test_nothing_is_cut_that_may_be_a_table(watch: Callable[..., ampscope.Scope]) -> None:
    scopes: list[ampscope.Scope] = []
    healed = train(lambda model, scaler: scopes.append(watch(model, scaler, heal=True)))
    assert [each["kind"] for each in cures(scopes[0])] == [CureKind.LEFT_OUT]
    assert healed == train(lambda *_: None, by_hand=True)
