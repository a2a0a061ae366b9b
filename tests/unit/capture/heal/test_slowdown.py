"""What a change costs is measured on one and the same step; steps that get longer by themselves are not its fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.capture.heal import in_force
from ampscope.capture.rerun.engine import RerunEngine
from ampscope.trace.schema import EventKind
from tests.support.training.small_loop import WIDTH
from tests.unit.capture.heal.told import cures
from tests.unit.capture.heal.trained import BAD_STEP, made, trained

pytestmark = pytest.mark.usefixtures("strict_guards")


@pytest.fixture
def scopes() -> Iterator[list[ampscope.Scope]]:
    opened: list[ampscope.Scope] = []
    yield opened
    for scope in opened:
        scope.close()


@pytest.mark.parametrize(
    ("with_it", "without", "step", "share"),
    [
        ([0.12, 0.13, 0.12], [0.1, 0.1, 0.11], 0.05, 0.2),
        ([0.12, 0.12, 0.12], [0.1, 0.1, 0.1], 0.42, 0.05),  # most of the step is something else
        ([0.12, 0.13, 0.1], [0.1, 0.1, 0.11], 0.05, 0.0),  # no more than they vary
        ([0.0012, 0.0012, 0.0012], [0.001, 0.001, 0.001], 0.0, 0.0),  # too little to be told from noise
        ([0.1, 0.1, 0.1], [0.12, 0.12, 0.12], 0.05, 0.0),  # it is even quicker
    ],
)
def test_the_share_of_a_step(with_it: list[float], without: list[float], step: float, share: float) -> None:
    assert in_force.share_of_time(with_it, without, step) == pytest.approx(share)


class Clock:
    """Time that passes only where a module takes some."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RerunEngine, "clock", CLOCK)


class Slow(nn.Module):
    """Takes longer in float32, in seconds of the clock; and, of its own, as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.armed = False
        self.costs_in_float32 = 0.0
        self.work = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(x * 2.0**18) * 2.0**-18 if self.armed else self.second(x)
        CLOCK.now += self.work + (self.costs_in_float32 if x.dtype is torch.float32 else 0.0)
        return self.last(x)


def run(folder: Path, scopes: list[ampscope.Scope], slow: float, before: Any, **options: Any) -> list[dict[str, Any]]:
    def watch(model: Any, scaler: Any) -> None:
        model.costs_in_float32 = slow
        heal = ampscope.Healing(quiet_steps=0, **options)
        scopes.append(ampscope.watch(model, scaler, dir=folder, quiet=True, heal=heal))

    healed = trained(made(Slow), watch, before=before, steps=BAD_STEP + 8)
    assert torch.tensor(healed["losses"][BAD_STEP + 1 :]).isfinite().all()
    assert len(cures(scopes[0])) == 1
    return cures(scopes[0], EventKind.CURE_LIFTED)


def once(model: Any, step: int) -> None:
    model.armed = step == BAD_STEP


def longer(model: Any, step: int) -> None:
    model.armed = step == BAD_STEP
    model.work = 60.0 if step > BAD_STEP else 1.0


def test_a_change_that_takes_too_long_is_lifted_early(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    (lifted,) = run(run_folder, scopes, 20.0, once)
    assert lifted["step"] == BAD_STEP + 5
    assert lifted["text"].startswith("a step takes 2000% longer with it")


def test_one_that_may_take_so_long_stays(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    assert run(run_folder, scopes, 20.0, once, max_slowdown=1e6) == []


def test_steps_that_get_longer_by_themselves_lift_nothing(run_folder: Path, scopes: list[ampscope.Scope]) -> None:
    assert run(run_folder, scopes, 0.0, longer, max_slowdown=0.05) == []
