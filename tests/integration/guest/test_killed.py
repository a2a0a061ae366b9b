"""``kill -9`` in the middle of a step: the run opens, is diagnosed, and holds every step before."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ampscope
from ampscope.trace.schema import ReplayStatus, ScalerAction, Table
from tests.integration.guest.killed import OVERFLOW
from tests.support.paths import ROOT as REPOSITORY

LAST = 6


@pytest.mark.parametrize("moment", ["forward", "backward", "optimizer"])
def test_every_step_before_is_there(moment: str, run_folder: Path) -> None:
    program: list[str | Path] = [sys.executable, "-m", "tests.integration.guest.killed", run_folder, str(LAST), moment]
    done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = ampscope.open_run(run_folder)
    assert run.status == "interrupted"
    rows = run.rows(Table.STEPS)
    assert [row.step for row in rows] == list(range(LAST))
    assert [row.step for row in rows if row.skipped] == [OVERFLOW]
    assert all(row.loss is not None and row.scale is not None for row in rows)
    (incident,) = run.rows(Table.INCIDENTS)
    assert (incident.step, incident.replay) == (OVERFLOW, ReplayStatus.EXACT)
    assert run.rows(Table.OPS, step=OVERFLOW)
    actions = [row.action for row in run.rows(Table.SCALER_EVENTS)]
    assert actions[0] == ScalerAction.INIT
    assert ScalerAction.SKIP in actions
    diagnosis = ampscope.diagnose(run)
    assert diagnosis.run.steps == LAST
    assert [one.step for one in diagnosis.incidents] == [OVERFLOW]
