"""What becomes of a traced step's bad values is asked anew where they, or the ops, are others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope import provenance
from ampscope.capture.tracing.traced_rows import BadFlow
from ampscope.trace.schema import Table
from tests.support.training.small_loop import make_scaler

OVERFLOWS = 7


class Masked(nn.Module):
    """Attention weights with a mask of -inf, and a division whose divisor may overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        scores = self.layer(x).masked_fill(torch.eye(4, dtype=torch.bool), float("-inf"))
        divisor = torch.full((4,), 100.0, dtype=torch.float16) * factor
        return scores.softmax(-1).float() + (1 / divisor).float()


def traced(folder: Path, *, overflows: bool) -> tuple[list[Any], int]:
    """The ops of a few traced steps, and how many incidents they had."""
    torch.manual_seed(0)
    model, scaler = Masked(), make_scaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ampscope.watch(model, scaler, dir=folder, every=1, quiet=True):
        for step in range(9):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(4, 4), 1e3 if overflows and step == OVERFLOWS else 2.0).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    run = ampscope.open_run(folder)
    return [*run.rows(Table.OPS), *run.rows(Table.EDGES)], len(run.rows(Table.INCIDENTS))


def test_a_mask_of_every_step_is_not_walked_in_every_step(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walked = []
    absorbed = provenance.absorbed

    def noted(graph: provenance.Graph) -> Any:
        walked.append(graph)
        return absorbed(graph)

    monkeypatch.setattr(provenance, "absorbed", noted)
    rows, _ = traced(run_folder.with_name("once"), overflows=False)
    once = len(walked)
    monkeypatch.setattr(BadFlow, "of", lambda *_: object())
    assert list(map(str, traced(run_folder.with_name("each"), overflows=False)[0])) == list(map(str, rows))
    assert 2 * once < len(walked) - once, "the first steps have other ops than those that follow"


def test_an_overflow_that_comes_later_is_told_beside_the_mask(run_folder: Path) -> None:
    assert traced(run_folder.with_name("healthy"), overflows=False)[1] == 0
    assert traced(run_folder.with_name("overflows"), overflows=True)[1] == 1
