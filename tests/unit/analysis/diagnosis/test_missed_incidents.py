"""A failure that no replay has looked at is told with another one only where it goes on from that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.capture import budgets
from ampscope.trace.vocabulary import FORGOTTEN_AFTER, Cause

FIRST, AGAIN = 4, 4 + 5 + FORGOTTEN_AFTER


class TwoFaults(nn.Module):
    """The logarithm of zero, or an overflow of its own cast: both make the loss NaN, and all gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.fault = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.fault == "logarithm":
            x = x + torch.log((x * 0).float())
        x = self.last(x)
        return x + x.half() * 2.0**17 * 0.5 if self.fault == "overflow" else x


def test_a_later_failure_of_another_cause_is_not_counted_to_an_earlier_one(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets.ReplayBudget, "_within_share", lambda *_: False)
    torch.manual_seed(0)
    model = TwoFaults()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with ampscope.watch(model, scaler, dir=run_folder, quiet=True, every=0):
        for step in range(AGAIN + 3):
            model.fault = "logarithm" if FIRST <= step < FIRST + 4 else "overflow" if step in (AGAIN, AGAIN + 1) else ""
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (model(torch.randn(4, 8)).float() - 1).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    told = [(each.cause, each.step, each.last_step, each.count) for each in ampscope.diagnose(run_folder).incidents]
    assert told == [(Cause.LOG_ZERO, FIRST, FIRST + 3, 4), (Cause.UNKNOWN, AGAIN, AGAIN + 1, 2)]
