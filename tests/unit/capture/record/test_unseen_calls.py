"""A loop whose model is never called as the watched one is: said once, and no verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.cli.output import Exit
from ampscope.trace.schema import EventKind, Table
from ampscope.trace.vocabulary import Verdict
from tests.support.training.small_loop import mlp

Call = Callable[[nn.Module, Tensor], Tensor]


def as_called(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model(x)
    return result


def forward_only(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model.forward(x)
    return result


def events_of(scope: ampscope.Scope) -> list[str]:
    told = (EventKind.UNSEEN, EventKind.SEEN)
    return [row.kind for row in ampscope.open_run(scope.folder).rows(Table.EVENTS) if row.kind in told]


def train(folder: Path, calls: Sequence[Call]) -> ampscope.Scope:
    """One step for each of ``calls``, with a scaler: its steps are seen whether or not their forward is."""
    model, scaler = nn.Linear(8, 8), torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with ampscope.watch(model, scaler, dir=folder) as scope:
        for call in calls:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = call(model, torch.ones(4, 8)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return scope


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_it_is_told_once(steps: int, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope = train(run_folder, [forward_only] * steps)
    assert events_of(scope) == [EventKind.UNSEEN]
    assert capsys.readouterr().err.count("no call of the watched model was seen") == 1
    diagnosis = ampscope.diagnose(run_folder)
    assert diagnosis.verdict is Verdict.NOT_OBSERVED
    assert Exit[diagnosis.verdict.name] == 2
    assert "model.forward(x)" in diagnosis.summary


def test_calls_that_are_seen_later_are_enough(run_folder: Path) -> None:
    scope = train(run_folder, [forward_only] * 3 + [as_called] * 2)
    assert events_of(scope) == [EventKind.UNSEEN, EventKind.SEEN]
    assert ampscope.diagnose(run_folder).verdict is Verdict.HEALTHY


def test_nothing_is_told_of_a_loop_that_is_seen(run_folder: Path) -> None:
    assert events_of(train(run_folder, [as_called] * 3)) == []
    assert ampscope.diagnose(run_folder).verdict is Verdict.HEALTHY


def test_a_run_without_a_step_tells_what_to_do(run_folder: Path) -> None:
    """The optimizer holds another model's parameters."""
    other = mlp()
    optimizer = torch.optim.SGD(other.parameters(), 0.01)
    with ampscope.watch(mlp(), dir=run_folder, quiet=True):
        for _ in range(3):
            other(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
    diagnosis = ampscope.diagnose(run_folder)
    assert (diagnosis.verdict, diagnosis.run.steps) == (Verdict.NOT_OBSERVED, 0)
    assert "the very model that it trains" in diagnosis.summary
