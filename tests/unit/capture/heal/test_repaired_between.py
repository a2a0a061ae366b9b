"""A weight is repaired where no graph needs it as it is: other losses of the same iteration go backward still."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampscope
from ampscope.trace.schema import CureKind
from tests.support.training.small_loop import WIDTH
from tests.unit.capture.heal.told import cures
from tests.unit.capture.heal.trained import BAD_STEP, SCALE, STEPS

pytestmark = pytest.mark.usefixtures("strict_guards")


class Pair(nn.Module):
    """What makes and what judges."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(WIDTH, WIDTH)
        self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.maker(given)
        return self.judge(made).float().mean(), -self.judge(made.detach()).float().mean()


def test_a_weight_that_a_later_backward_reads_is_repaired_before_the_next_step(
    watch: Callable[..., ampscope.Scope],
) -> None:
    torch.manual_seed(0)
    model: Any = Pair()
    first, second = (torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (model.maker, model.judge))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scope = watch(model, scaler, heal=True)
    norm = model.judge[1]
    for step in range(STEPS):
        if step == BAD_STEP:
            with torch.no_grad():
                norm.weight[0] = torch.nan
        first.zero_grad()
        second.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            made, judged = map(scaler.scale, model(torch.randn(8, WIDTH)))
        own = list(model.maker.parameters())
        for parameter, gradient in zip(own, torch.autograd.grad(made, own, retain_graph=True), strict=True):
            parameter.grad = gradient
        scaler.step(first)
        judged.backward()
        scaler.step(second)
        scaler.update()
    (told,) = cures(scope)
    assert (told["step"], told["kind"], told["applied"]) == (BAD_STEP, CureKind.WEIGHTS, False)
    assert all(bool(each.isfinite().all()) for each in model.parameters())
