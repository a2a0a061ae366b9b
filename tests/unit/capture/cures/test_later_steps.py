"""What is made of a cure: what it costs, how it does on later steps, and what else is next to overflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampscope.capture.budgets import ReplayBudget
from ampscope.capture.changes.replay_change import ModulesInFloat32
from ampscope.capture.cures.trial_costs import StepTimes
from ampscope.capture.rerun.engine import Ran, RerunEngine
from ampscope.capture.torch_support.guard import Guard
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.sites import Sites
from ampscope.trace.schema import ReplayRow, Table
from tests.support.training.small_loop import here
from tests.support.training.twin_runs import Loop, Watched, train_both


class Part(nn.Module):
    """Computes something of its input."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, h: Tensor) -> Tensor:
        return self.of(h)


class Net(nn.Module):
    """A square that overflows float16, beside a number that may be next to it."""

    def __init__(self, beside: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.square = Part(lambda h: (h * 0 + 300).square())
        self.beside = Part(beside)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.inner(x)
        return self.square(h).mean(-1), self.beside(h)


def loop(beside: Callable[[int], Callable[[Tensor], Tensor]], *, steps: int = 1) -> Loop:
    """A loop whose steps all fail; ``beside`` gives what is computed beside in a step."""

    def run(watch: Callable[..., Any]) -> Any:
        model = Net(beside(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler(here(), init_scale=1.0, backoff_factor=0.9)
        watch(model, scaler)
        for step in range(steps):
            model.beside.of = beside(step)
            optimizer.zero_grad()
            with torch.autocast(here(), dtype=torch.float16):
                one, other = model(torch.randn(4, 8))
            scaler.scale(one.float().mean() * 1e-6 + other.float().mean() * 1e-6).backward()
            scaler.step(optimizer)
            scaler.update()
        return {"model": model, "optimizer": optimizer, "scaler": scaler}

    return run


def tried(watched: Watched) -> list[ReplayRow]:
    return watched.run.rows(Table.REPLAYS)


def constant(number: float) -> Callable[[int], Callable[[Tensor], Tensor]]:
    return lambda step: lambda h: h * 0 + number


def test_a_module_next_to_overflow_is_tried_with_the_cure(run_folder: Path) -> None:
    rows = tried(Watched.train(loop(constant(40000.0)), run_folder, replay_budget=8))
    modules = [row for row in rows if row.change == "modules_fp32"]
    assert [tuple(row.modules) for row in modules] == [("square",), ("square", "beside")]
    assert modules[0].reason == ""
    assert modules[1].reason == "beside is within a factor of 1.6 of overflow in the same step"
    assert [row.outcome for row in modules] == ["finite"] * 2


@pytest.mark.parametrize("number", [20000.0, 65504.0, -65504.0], ids=["far from it", "its end", "what masks"])
def test_what_is_not_next_to_overflow_is_left_alone(run_folder: Path, number: float) -> None:
    rows = tried(Watched.train(loop(constant(number)), run_folder, replay_budget=8))
    assert [tuple(row.modules) for row in rows if row.change == "modules_fp32"] == [("square",)]


def test_a_cure_is_followed_on_later_steps(run_folder: Path) -> None:
    watched = train_both(loop(constant(1.0), steps=5), run_folder)
    rows = tried(watched)
    assert [(row.step, row.form, row.followed) for row in rows if row.step] == [
        *((1, "in_float32", 1), (1, None, 0)),
        *((step, "in_float32", step) for step in (2, 3)),
    ]
    assert rows[4].change == "bf16", "the plan goes on after the cure"
    assert watched.warnings == []


def test_a_cure_that_only_moves_the_failure_is_widened(run_folder: Path) -> None:
    def beside(step: int) -> Callable[[Tensor], Tensor]:
        return lambda h: (h * 0 + (300.0 if step else 1.0)).square()

    rows = tried(Watched.train(loop(beside, steps=2), run_folder))
    later = [(row.change, tuple(row.modules), row.outcome) for row in rows if row.step]
    assert later[:2] == [("form", (), "nonfinite"), ("modules_fp32", ("square", "beside"), "finite")]


def test_what_a_cure_writes_more_is_counted_in_its_own_dtypes(run_folder: Path) -> None:
    rows = tried(Watched.train(loop(constant(1.0)), run_folder, replay_budget=8))
    form = next(row for row in rows if row.form is not None)
    wide, half = 4 * 32, 2 * 32  # bytes of 32 elements
    cast_and_square = wide + wide - half
    means = (4 * 4 - 2 * 4) - 4 * 4  # of four rows; the loss need not cast them
    assert form.extra_bytes == cast_and_square + means
    assert form.extra_time is not None
    assert form.extra_time >= 0.0


def test_costs_are_not_measured_where_no_trial_is_left(run_folder: Path) -> None:
    rows = tried(Watched.train(loop(constant(1.0)), run_folder, replay_budget=2))
    assert [row.outcome for row in rows] == ["finite"] * 2
    assert [row.extra_time for row in rows] == [None] * 2


@pytest.mark.parametrize(
    ("unchanged", "changed", "expected"),
    [
        ([0.010, 0.011], [0.013, 0.012], pytest.approx(0.2)),
        ([0.010, 0.013], [0.012, 0.014], 0.0),
        ([1.0], [1.02], 0.0),
        ([1.0], [1.25], pytest.approx(0.25)),
        ([1.0], [0.5], 0.0),
    ],
    ids=["more", "by what two runs differ", "within the noise", "one long run", "less"],
)
def test_the_time_of_a_change_is_the_least_of_its_runs(
    monkeypatch: pytest.MonkeyPatch, unchanged: list[float], changed: list[float], expected: Any
) -> None:
    seconds = iter([*unchanged, *changed])
    monkeypatch.setattr(RerunEngine, "run", lambda *_: Ran(seconds=next(seconds)))
    no_step: Any = None
    times = StepTimes(no_step, _engine())
    assert times.extra_time(ModulesInFloat32(("square",))) == expected
    assert list(seconds) == []


def _engine() -> RerunEngine:
    models = Models([nn.Linear(1, 1)])
    return RerunEngine(models, Sites(0, models.module_type), ReplayBudget(1.0, 3), Guard("the test", pytest.fail))


def test_no_time_where_a_run_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RerunEngine, "run", lambda *_: Ran(reason="no room"))
    no_step: Any = None
    times = StepTimes(no_step, _engine())
    assert times.extra_time(ModulesInFloat32(("square",))) is None
