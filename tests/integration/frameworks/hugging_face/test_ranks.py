"""A Trainer on two ranks, each watched: the same bits, one run, and the rank that went bad is told from the other."""

from __future__ import annotations

from pathlib import Path

import pytest

import ampscope
from ampscope.trace.schema import ReplayStatus, Table
from tests.integration.frameworks.hugging_face.small_trainer import BAD_STEP, STEPS
from tests.support.torchrun import torchrun

pytestmark = pytest.mark.slow
PROGRAM = "tests.integration.frameworks.hugging_face.ranks_of_a_trainer"


def trained(folder: Path, *, bad: int) -> ampscope.Run:
    """Trains unwatched and watched, and asserts that each rank has the same bits; the run."""
    digests = []
    for watched in ("0", "1"):
        home = folder / watched
        home.mkdir()
        torchrun(PROGRAM, home, watched, str(bad), ranks=2)
        digests.append([(home / f"weights-{rank}").read_text() for rank in range(2)])
    assert digests[0] == digests[1]
    return ampscope.open_run(folder / "1" / "ampscope")


def test_healthy_ranks(tmp_path: Path) -> None:
    run = trained(tmp_path, bad=-1)
    assert run.ranks == [0, 1]
    assert ampscope.diagnose(run).verdict == "healthy"
    assert [row.step for row in run.rows(Table.STEPS)] == [*range(STEPS)] * 2


def test_one_rank_overflows(tmp_path: Path) -> None:
    run = trained(tmp_path, bad=1)
    first, received = (run.rows(Table.INCIDENTS, rank=rank)[0] for rank in (1, 0))
    assert (first.step, first.replay) == (BAD_STEP, ReplayStatus.EXACT)
    assert received.step == BAD_STEP
    assert received.replay is not ReplayStatus.EXACT
