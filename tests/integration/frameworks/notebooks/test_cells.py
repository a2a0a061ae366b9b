"""The cell with ``watch`` is run again: the old run ends, a new one begins, and no forgotten model stays alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampscope
from ampscope.capture.scope import open_scopes
from ampscope.errors import WatchError
from ampscope.trace.schema import EventKind, ReplayStatus, Table
from ampscope.trace.vocabulary import Cause, Verdict
from tests.support.primary import primary_incident
from tests.support.training.small_models import TwoLayers
from tests.support.training.torch_state import installed


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    for scope in open_scopes():
        scope.close()


def cell(model: nn.Module, steps: int = 4, bad: int = -1) -> tuple[Tensor, ...]:
    """Trains ``model``; the batch of step ``bad`` is not finite."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(0)
    for step in range(steps):
        x = torch.randn(4, 4) * (float("nan") if step == bad else 1.0)
        optimizer.zero_grad()
        F.mse_loss(model(x), torch.zeros(4, 4)).backward()
        optimizer.step()
    return tuple(parameter.detach().clone() for parameter in model.parameters())


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def compiled_of(model: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    return compiled


def test_watching_again_ends_the_run_quietly_and_begins_another(capsys: pytest.CaptureFixture[str]) -> None:
    before, plain, watched = installed(), net(), net()
    first = ampscope.watch(watched, quiet=True)
    cell(watched)
    second = ampscope.watch(watched, quiet=True)
    cell(watched)
    second.close()
    assert "closed" in repr(first)
    assert installed() == before
    assert capsys.readouterr() == ("", "")
    (note,) = ampscope.open_run(first.folder).rows(Table.EVENTS, kind=EventKind.NOTE)
    assert f"the next one is {second.folder.relative_to(Path.cwd())}" in note.text
    for scope in (first, second):
        diagnosis = ampscope.diagnose(scope.folder)
        assert (diagnosis.verdict, diagnosis.run.steps, diagnosis.run.status) == (Verdict.HEALTHY, 4, "closed")
    cell(plain)
    cell(plain)
    assert all(one.equal(other) for one, other in zip(plain.parameters(), watched.parameters(), strict=True))


def test_the_second_run_sees_a_failure_as_the_first_would() -> None:
    model = net()
    ampscope.watch(model, quiet=True)
    cell(model, steps=2)
    with ampscope.watch(model, quiet=True) as scope:
        cell(model, bad=3)
    primary = primary_incident(ampscope.open_run(scope.folder))
    assert (primary.step, primary.cause, primary.replay) == (3, Cause.BAD_INPUT, ReplayStatus.EXACT)


@pytest.mark.parametrize("refused", [{"overhead": 2}, {"every": -1}, {"dir": "/proc/no/such"}])
def test_a_refused_call_leaves_the_run_open(refused: dict[str, Any]) -> None:
    model = net()
    with ampscope.watch(model, quiet=True) as scope:
        with pytest.raises(WatchError):
            ampscope.watch(model, quiet=True, **refused)
        assert open_scopes() == [scope]


def test_the_same_model_wrapped_or_not_is_the_same_model() -> None:
    model = net()
    first = ampscope.watch(compiled_of(model), quiet=True)
    second = ampscope.watch(model, quiet=True)
    assert open_scopes() == [second]
    assert "closed" in repr(first)


def forgotten_at_once() -> tuple[Any, ...]:
    model = net()
    return weakref.ref(model), ampscope.watch(model, quiet=True).folder


def forgotten_after_training() -> tuple[Any, ...]:
    model = net()
    folder = ampscope.watch(model, quiet=True).folder
    cell(model, steps=3)
    return weakref.ref(model), folder


def forgotten_with_a_scaler_that_stays() -> tuple[Any, ...]:
    model, scaler = TwoLayers(), torch.amp.GradScaler("cpu", init_scale=64.0)
    folder = ampscope.watch(model, scaler, quiet=True).folder
    return weakref.ref(model), folder, scaler


def forgotten_in_the_middle_of_a_step() -> tuple[Any, ...]:
    """The cell was interrupted after a forward."""
    model = net()
    folder = ampscope.watch(model, quiet=True).folder
    model(torch.randn(4, 4)).sum()
    return weakref.ref(model), folder


def forgotten_compiled() -> tuple[Any, ...]:
    model = compiled_of(net())
    folder = ampscope.watch(model, quiet=True).folder
    cell(model, steps=2)
    return weakref.ref(model), folder


FORGOTTEN = [
    forgotten_at_once,
    forgotten_after_training,
    forgotten_with_a_scaler_that_stays,
    forgotten_in_the_middle_of_a_step,
    forgotten_compiled,
]


@pytest.mark.parametrize("forget", FORGOTTEN)
def test_a_model_that_nobody_holds_is_let_go_at_the_next_watch(forget: Callable[[], tuple[Any, ...]]) -> None:
    before = installed()
    model, folder, *kept = forget()
    gc.collect()
    assert model() is not None, "what is watched stays watched until watch is called again"
    other = net()
    with ampscope.watch(other, quiet=True) as scope:
        assert open_scopes() == [scope]
        assert model() is None
        assert ampscope.open_run(folder).status == "closed"
    assert installed() == before
    del kept


def test_models_that_somebody_holds_stay_watched() -> None:
    """The scopes themselves need not be kept."""
    one, other, compiled = net(), net(), compiled_of(net())
    for model in (one, other, compiled):
        ampscope.watch(model, quiet=True)
    folders = [scope.folder for scope in open_scopes()]
    for model in (one, other, compiled):
        cell(model)
    for scope in open_scopes():
        scope.close()
    assert [ampscope.diagnose(folder).run.steps for folder in folders] == [4, 4, 4]
