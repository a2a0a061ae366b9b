"""Gradients of one optimizer are unscaled, those of another are not: what may be done to which of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ampscope
from ampscope.trace.vocabulary import Cause
from tests.support.training.model_parts import grad_of
from tests.support.training.small_loop import BATCH, WIDTH, here, make_scaler, mlp, mse

pytestmark = pytest.mark.usefixtures("device")

STEPS = 4


class Pair:
    """A body and a head with an optimizer each, one scaler, and a model beside them that nothing scales."""

    def __init__(self) -> None:
        self.body, self.head, self.beside = mlp(), nn.Linear(WIDTH, WIDTH), mlp()
        self.parts = [self.body, self.head]
        self.optimizers = [torch.optim.SGD(part.parameters(), 0.01) for part in self.parts]
        self.own = torch.optim.SGD(self.beside.parameters(), 0.01)
        self.scaler = make_scaler()

    def backward(self) -> None:
        for optimizer in (*self.optimizers, self.own):
            optimizer.zero_grad()
        with torch.autocast(here(), dtype=torch.float16):
            loss = self.head(self.body(torch.randn(BATCH, WIDTH))).float().square().mean()
        self.scaler.scale(loss).backward()
        mse(self.beside, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)).backward()

    def unscale(self, number: int) -> None:
        self.scaler.unscale_(self.optimizers[number])

    def step(self) -> None:
        self.own.step()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()


def clip(*parts: nn.Module) -> None:
    nn.utils.clip_grad_norm_([parameter for part in parts for parameter in part.parameters()], 0.5)


def each_as_it_is_unscaled(pair: Pair) -> None:
    for number, part in enumerate(pair.parts):
        pair.unscale(number)
        clip(part)


def both_together(pair: Pair) -> None:
    pair.unscale(0)
    pair.unscale(1)
    clip(*pair.parts)


def both_halved(pair: Pair) -> None:
    """Half of what is scaled is scaled; then the one that is not is clipped."""
    pair.unscale(0)
    torch._foreach_mul_([grad_of(parameter) for part in pair.parts for parameter in part.parameters()], 0.5)
    clip(pair.body)


def what_nothing_scales(pair: Pair) -> None:
    pair.unscale(0)
    clip(pair.body, pair.beside)


def only_looked_at(pair: Pair) -> None:
    pair.unscale(0)
    nn.utils.get_total_norm([grad_of(parameter) for part in pair.parts for parameter in part.parameters()])
    clip(pair.body)


def the_other(pair: Pair) -> None:
    pair.unscale(0)
    clip(pair.body)
    clip(pair.head)


def the_other_by_value(pair: Pair) -> None:
    pair.unscale(1)
    nn.utils.clip_grad_value_(pair.body.parameters(), 0.5)


def both_by_one_norm(pair: Pair) -> None:
    pair.unscale(0)
    clip(*pair.parts)


def findings_of(edit: Callable[[Pair], None], folder: Path) -> list[Cause]:
    pair = Pair()
    with ampscope.watch([*pair.parts, pair.beside], pair.scaler, dir=folder, quiet=True):
        for _ in range(STEPS):
            pair.backward()
            edit(pair)
            pair.step()
    return [each.cause for each in ampscope.diagnose(folder).findings]


@pytest.mark.parametrize(
    "edit", [each_as_it_is_unscaled, both_together, both_halved, what_nothing_scales, only_looked_at]
)
def test_what_holds_no_scale_may_be_clipped(edit: Callable[[Pair], None], run_folder: Path) -> None:
    assert findings_of(edit, run_folder) == []


@pytest.mark.parametrize("edit", [the_other, the_other_by_value, both_by_one_norm])
def test_what_holds_the_scale_may_not(edit: Callable[[Pair], None], run_folder: Path) -> None:
    assert findings_of(edit, run_folder) == [Cause.MISUSE_CLIP_BEFORE_UNSCALE]
