"""``kill -9``: the run opens, is diagnosed, and holds every step that was over.

``make soak`` kills two hundred loops, each at a moment of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ampscope
from ampscope.trace.schema import ReplayStatus, ScalerAction, Table
from tests.integration.guest.killed import OVERFLOW
from tests.integration.guest.killed_loops import DEATHS, LOOPS
from tests.support.paths import ROOT as REPOSITORY
from tests.support.training.injuries.soak import Record, soaked

LAST = 6
#: Deaths at any moment.
_SOAK = 200

posix = pytest.mark.skipif(os.name != "posix", reason="needs fork and signals")


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


def _killed_loops(folder: Path, *arguments: object) -> None:
    program = [sys.executable, "-m", "tests.integration.guest.killed_loops", str(folder), *map(str, arguments)]
    subprocess.run(program, cwd=REPOSITORY, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of loops that died when a step was over."""
    folder = tmp_path_factory.mktemp("dead")
    _killed_loops(folder, "after")
    return folder


def _steps(folder: Path, optimizers: int) -> list[int]:
    """How many steps of each optimizer are there; they are the first ones."""
    with ampscope.open_run(folder) as run:
        rows = run.rows(Table.STEPS)
        found = [[row.step for row in rows if row.optimizer == each] for each in range(optimizers)]
    assert found == [list(range(len(steps))) for steps in found]
    assert sum(map(len, found)) == len(rows)
    return list(map(len, found))


@posix
@pytest.mark.parametrize("steps", DEATHS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_step_is_there_when_the_call_that_ends_it_returns(loop: str, steps: int, dead: Path) -> None:
    optimizers = LOOPS[loop][1]
    assert _steps(dead / f"{loop}-{steps}", optimizers) == [steps] * optimizers


@posix
@pytest.mark.soak
def test_no_moment_loses_a_step_that_was_over(tmp_path: Path, record_property: Record) -> None:
    _killed_loops(tmp_path, "anytime", _SOAK)
    lost = []
    for number in range(_SOAK):
        folder = tmp_path / str(number)
        loop, over = folder.with_suffix(".done").read_text().split()
        if not (folder / "run.json").exists():
            assert over == "0", loop
            continue
        steps = _steps(folder, LOOPS[loop][1])
        if not all(int(over) <= each <= int(over) + 1 for each in steps):
            lost.append((number, loop, over, steps))
        ampscope.diagnose(folder)
    soaked(record_property, "kills: torn or lost", _SOAK, len(lost))
    assert lost == []
