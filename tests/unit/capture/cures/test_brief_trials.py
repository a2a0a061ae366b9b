"""A change of a call or of a module asks whether the step is finite: backward is only seen where that was not all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampscope.capture.torch_support.modes import modes_at_rest
from ampscope.capture.tracing.tracer import Tracer
from ampscope.trace.schema import ReplayRow, Table
from tests.support.training.small_loop import here
from tests.support.training.twin_runs import Loop, Watched, train_both

Function = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A function of what a linear layer gives, and one of a second layer's behind it."""

    def __init__(self, first: Function, second: Function) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.other(self.first(self.one(x))))


def loop(first: Function, second: Function) -> Loop:
    """One step, which fails."""

    def run(watch: Callable[..., Any]) -> Any:
        model = Net(first, second)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(here(), init_scale=1.0)
        watch(model, scaler)
        with torch.autocast(here(), dtype=torch.float16):
            loss = model(torch.ones(2, 4, device=here())).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return model, None

    return run


def root_of_nothing(h: Tensor) -> Tensor:
    """Finite, and its slope is not, in half precision or in any other."""
    return (h * 0).sqrt()


def square(h: Tensor) -> Tensor:
    """Beyond float16, and of ordinary size in the end."""
    return (h * 0 + 300).square() * 1e-4


def tried(watched: Watched) -> list[ReplayRow]:
    return list(watched.run.rows(Table.REPLAYS))


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each backward that replays ran, whether it was seen."""
    ran: list[bool] = []

    def noted(*kinds: type) -> Any:
        ran.append(Tracer not in kinds)
        return modes_at_rest(*kinds)

    monkeypatch.setattr("ampscope.capture.rerun.player.modes_at_rest", noted)
    return ran


def test_a_form_that_cures_has_its_backward_unseen(run_folder: Path, backwards: list[bool]) -> None:
    watched = train_both(loop(square, lambda h: h), run_folder, replay_budget=2)
    assert [(row.change, row.outcome) for row in tried(watched)] == [("fp32", "finite"), ("form", "finite")]
    assert backwards == [True, True, False]


def test_a_loss_that_is_not_finite_needs_no_backward(run_folder: Path, backwards: list[bool]) -> None:
    watched = train_both(loop(square, lambda h: (h * 0 + 300).square() * 1e-4), run_folder, replay_budget=1)
    assert [(row.change, row.outcome) for row in tried(watched)] == [("fp32", "finite"), ("form", "nonfinite")]
    assert backwards == [True, True], "that of the step as it was and that in float32"


def test_what_fails_in_backward_is_run_once_more_and_seen(run_folder: Path, backwards: list[bool]) -> None:
    watched = train_both(loop(lambda h: (h * 0).log().exp() + h, root_of_nothing), run_folder, replay_budget=2)
    assert [row.outcome for row in tried(watched)] == ["nonfinite"] * 3
    assert backwards == [True, True, False, True, False, True], "no other form of the root mends the logarithm before"


class Gate(nn.Module):
    """A function as a module, so that it can be kept in float32 alone."""

    def __init__(self, of: Function) -> None:
        super().__init__()
        self.of = of

    def forward(self, h: Tensor) -> Tensor:
        return self.of(h)


def test_a_failure_that_moves_in_backward_is_followed_by_modules(run_folder: Path) -> None:
    early = Gate(lambda h: (h * 0 + 1.0002).sub(1).sqrt() + h)  # rounds to the root of zero, whose slope is infinite
    late = Gate(lambda h: (h * 0 + 1.0001).sub(1).sqrt() + h)
    watched = train_both(loop(early, late), run_folder, replay_budget=4)
    modules = [(tuple(row.modules), row.outcome) for row in tried(watched) if row.change == "modules_fp32"]
    assert modules[:2] == [(("second",), "nonfinite"), (("second", "first"), "finite")]
