"""Two ranks that communicate inside forward: a replay has what they sent, and asks nobody, whoever is watched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import ampscope
from ampscope.trace.schema import ReplayStatus, Table
from tests.integration.ranks.two_ranks import RANKS
from tests.support.paths import ROOT as REPOSITORY
from tests.support.training.small_loop import POISONED

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")


def _train(folder: Path, watchers: str) -> list[str]:
    """Runs both ranks; what each printed."""
    folder.mkdir()
    programs: list[list[str | Path]] = [
        [sys.executable, "-m", "tests.integration.ranks.two_ranks", str(rank), folder, watchers]
        for rank in range(RANKS)
    ]
    ranks = [
        subprocess.Popen(program, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for program in programs
    ]
    told = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, told
    return [out.strip() for out, _ in told]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return _train(tmp_path_factory.mktemp("ranks") / "nobody", "-")


@pytest.mark.parametrize("watchers", ["0", "01"], ids=["rank 0 watched", "both watched"])
def test_training_goes_on_as_if_nobody_watched(watchers: str, expected: list[str], tmp_path: Path) -> None:
    assert _train(tmp_path / "watched", watchers) == expected
    run = ampscope.open_run(tmp_path / "watched" / "run")
    incidents = run.rows(Table.INCIDENTS)
    assert [row.step for row in incidents] == [POISONED] * len(watchers)
    for row in incidents:
        assert (row.replay, row.replay_reason) == (ReplayStatus.EXACT, "")
    assert run.ranks == [int(rank) for rank in watchers]
