"""Several scopes in one process: models watched apart that share a scaler, and a run's folder that is watched again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampscope
from ampscope.capture.hooks import scaler_calls
from ampscope.trace.schema import EventKind, Table
from tests.support.training.small_loop import mlp
from tests.support.training.small_models import TwoLayers
from tests.support.training.torch_state import installed
from tests.support.training.training_loop import TrainingLoop
from tests.support.training.usage_bench import STEPS, WIDTH, Bench, loss_of


def test_a_scaler_that_two_scopes_watch_has_its_history_in_both(tmp_path: Path) -> None:
    models = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    methods = dict(vars(torch.amp.GradScaler))
    scopes = [ampscope.watch(model, scaler, dir=tmp_path / str(n), quiet=True) for n, model in enumerate(models)]
    for _ in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(optimizer)
        scaler.update()
    scopes[0].close()
    assert scaler_calls.is_watched(scaler)
    scopes[1].close()
    assert not scaler_calls.is_watched(scaler)
    assert dict(vars(torch.amp.GradScaler)) == methods
    for scope in scopes:
        run = ampscope.open_run(scope.folder)
        assert [row.scale for row in run.rows(Table.STEPS)] == [256.0, 256.0, 512.0, 512.0]
        assert ampscope.diagnose(run).findings == ()


def test_a_second_watch_on_the_same_folder_says_that_the_first_ends(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Bench(lambda model, scaler: ampscope.watch(model, scaler, dir=run_folder))
    for _ in first.steps():
        pass
    second = Bench(lambda model, scaler: ampscope.watch(model, scaler, dir=run_folder).close())
    assert not scaler_calls.is_watched(first.scaler)
    assert second.scaler is not first.scaler
    assert capsys.readouterr().err.count("watch was called again") == 1
    (note,) = ampscope.open_run(run_folder).rows(Table.EVENTS, kind=EventKind.NOTE)
    assert "the newer one goes on" in note.text
    assert ampscope.open_run(run_folder).manifest.segments[1:]


def test_a_folder_left_open_in_this_process_is_resumed(watch: Any) -> None:
    """A notebook's cell that is run again: the scope before is closed, the run goes on."""
    before, first, second = installed(), TrainingLoop(), TrainingLoop()
    scope = watch(first.model, first.scaler)
    first.step(2)
    again = watch(second.model, second.scaler, dir=scope.folder)
    assert type(first.model) is TwoLayers
    second.step(2)
    again.close()
    assert installed() == before
    rows = ampscope.open_run(scope.folder).rows(Table.STEPS)
    assert [(row.step, row.segment) for row in rows] == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_two_scopes_at_once_record_their_own_models(watch: Any) -> None:
    before = installed()
    one, other = TrainingLoop(), TrainingLoop(mlp())
    scopes = [watch(loop.model, loop.scaler) for loop in (one, other)]
    one.step(2)
    other.step(3)
    scopes[0].close()
    one.step()
    other.step()
    scopes[1].close()
    assert installed() == before
    rows = [ampscope.open_run(scope.folder).rows(Table.STEPS) for scope in scopes]
    assert [len(steps) for steps in rows] == [2, 4]
    assert all(row.loss is not None and row.scale is not None for steps in rows for row in steps)


def test_one_scaler_for_two_scopes(watch: Any) -> None:
    """The scaler's history goes to one of them, the steps each to its own."""
    one, other = TrainingLoop(), TrainingLoop(mlp())
    other.scaler = one.scaler
    scopes = [watch(loop.model, loop.scaler) for loop in (one, other)]
    one.step(2)
    other.step(3)
    for scope in scopes:
        scope.close()
    assert [len(ampscope.open_run(scope.folder).rows(Table.STEPS)) for scope in scopes] == [2, 3]
    assert type(one.scaler) is torch.amp.GradScaler
