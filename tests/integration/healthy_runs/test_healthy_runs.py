"""No healthy training draws an alarm: three hundred, over tasks, loops, precisions, optimizers and habits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ampscope
from ampscope.trace.schema import EventKind, Table
from ampscope.trace.vocabulary import RANGE_ALARMS, Severity, Verdict
from tests.integration.healthy_runs.runs import LOOPS, TASKS, OwnLoop, Setting, drawn, own_loops, train, train_own
from tests.support.training.twin_runs import exact_state

#: Trainings with the usual loop, and with a loop of their own.
USUAL, OWN = 195, 105


def _each(settings: Iterable[Setting | OwnLoop], quick: int) -> list[Any]:
    """All settings; the first ones are those of the ordinary run."""
    return [
        pytest.param(each, id=str(each), marks=() if each.seed < quick else pytest.mark.healthy_full)
        for each in settings
    ]


# Of the ordinary run: each task and each loop once, not always with the same habits.
@pytest.mark.parametrize("setting", _each(drawn(USUAL), len(TASKS)))
def test_a_healthy_run_is_healthy(setting: Setting, run_folder: Path) -> None:
    _is_healthy(run_folder, setting.steps, *train(setting, run_folder))


@pytest.mark.parametrize("setting", _each(own_loops(OWN), len(LOOPS)))
def test_a_healthy_run_with_a_loop_of_its_own_is_healthy(setting: OwnLoop, run_folder: Path) -> None:
    _is_healthy(run_folder, setting.steps, *train_own(setting, run_folder))


@pytest.mark.parametrize("setting", _each(drawn(USUAL), 3))
def test_healing_leaves_a_healthy_run_alone(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _is_left_alone(partial(train, setting), tmp_path, monkeypatch)


@pytest.mark.parametrize("setting", _each(own_loops(OWN), 3))
def test_healing_leaves_a_healthy_run_with_a_loop_of_its_own_alone(
    setting: OwnLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _is_left_alone(partial(train_own, setting), tmp_path, monkeypatch)


def _is_left_alone(training: Callable[[Path], Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``heal=True`` it ends in the same bits, and nothing was changed in it."""
    torch.manual_seed(0)
    plain = exact_state(list(training(folder / "plain")))
    monkeypatch.setattr(ampscope, "watch", partial(ampscope.watch, heal=True))
    torch.manual_seed(0)
    assert exact_state(list(training(folder / "healed"))) == plain
    assert ampscope.open_run(folder / "healed").rows(Table.EVENTS, kind=EventKind.CURE) == []


def _is_healthy(folder: Path, steps: int, losses: list[float], state: list[Tensor]) -> None:
    assert all(map(math.isfinite, losses)), "the training itself went wrong"
    assert all(bool((~tensor.isnan()).all()) for tensor in state), "the training itself went wrong"
    diagnosis = ampscope.diagnose(folder)
    assert [incident for incident in diagnosis.incidents if incident.severity is not Severity.INFO] == []
    assert diagnosis.findings == ()
    assert diagnosis.verdict is Verdict.HEALTHY
    assert diagnosis.run.steps >= steps
    notes = [row.text for row in ampscope.open_run(folder).rows(Table.EVENTS, kind=EventKind.NOTE)]
    assert [text for text in notes if text.startswith(RANGE_ALARMS)] == []
