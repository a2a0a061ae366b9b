"""No healthy training draws an alarm: three hundred, over tasks, precisions, optimizers and habits of the loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import ampscope
from ampscope.trace.vocabulary import Severity, Verdict
from tests.integration.healthy_runs.runs import TASKS, Setting, drawn, train

COUNT = 300
#: Of the ordinary run: each task once, not always with the same habits.
QUICK = len(TASKS)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(each, id=str(each), marks=() if each.seed < QUICK else pytest.mark.healthy_full)
        for each in drawn(COUNT)
    ],
)
def test_a_healthy_run_is_healthy(setting: Setting, run_folder: Path) -> None:
    losses, state = train(setting, run_folder)
    assert all(map(math.isfinite, losses)), "the training itself went wrong"
    assert all(bool((~tensor.isnan()).all()) for tensor in state), "the training itself went wrong"
    diagnosis = ampscope.diagnose(run_folder)
    assert [incident for incident in diagnosis.incidents if incident.severity is not Severity.INFO] == []
    assert diagnosis.findings == ()
    assert diagnosis.verdict is Verdict.HEALTHY
    assert diagnosis.run.steps >= setting.steps
