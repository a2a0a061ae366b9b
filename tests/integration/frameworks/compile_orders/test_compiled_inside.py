"""A layer that compiles a function when it is first called, and that the loop calls by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope import diagnose
from tests.support.primary import primary_incident
from tests.support.training.twin_runs import EXACT, train_both

STEPS, BAD, WIDTH = 6, 4, 16

#: Torch silences it, but not for those who take warnings for errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.compiled: list[Callable[..., Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        if not self.compiled:
            self.compiled.append(torch.compile(torch.relu, backend="eager"))
        rectified: Tensor = self.compiled[0](hidden * hidden)
        return F.layer_norm(rectified, (WIDTH,))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), nn.Linear(WIDTH, 4)


def loop(watch: Callable[..., Any], *, bad: bool) -> Any:
    torch._dynamo.reset()  # a process that has compiled nothing yet
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    watch(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = torch.randn(8, WIDTH), torch.randint(0, 4, (8,))
        x = x * 1e30 if bad and step == BAD else x
        F.cross_entropy(model.decoder(model.encoder(x)), y).backward()
        optimizer.step()
    return [model.state_dict(), optimizer]


def test_a_healthy_loop_stays_as_it_is(run_folder: Path) -> None:
    watched = train_both(partial(loop, bad=False), run_folder)
    assert diagnose(watched.run).verdict == "healthy"
    assert len(watched.steps) == STEPS


def test_a_bad_step_is_told(run_folder: Path) -> None:
    watched = train_both(partial(loop, bad=True), run_folder)
    primary = primary_incident(watched.run)
    assert (primary.step, primary.op, primary.module) == (BAD, "aten.mul.Tensor", "encoder")
    assert watched.replay_of(BAD) == EXACT
