"""A Trainer and an accelerator on two ranks: the same bits, one run, and which rank went bad by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

import ampscope
from ampscope.trace.schema import ReplayStatus, Table
from tests.integration.frameworks.hugging_face import small_accelerator, small_trainer
from tests.support.torchrun import torchrun

pytestmark = pytest.mark.slow
PROGRAM = "tests.integration.frameworks.hugging_face.two_ranks"
RANKS = range(2)
#: By whom they are trained, in how many steps: the loader of an accelerator shares its batches out among the ranks.
WAYS = {"trainer": small_trainer.STEPS, "accelerator": small_accelerator.STEPS // len(RANKS)}
BAD_STEP = small_trainer.BAD_STEP


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks(way: str, tmp_path: Path) -> None:
    torchrun(PROGRAM, tmp_path, way, ranks=len(RANKS))
    for home in (tmp_path / "healthy", tmp_path / "failing"):
        digests = [[(home / f"{kind}-{rank}").read_text() for rank in RANKS] for kind in ("unwatched", "watched")]
        assert digests[0] == digests[1], home.name
    healthy(ampscope.open_run(tmp_path / "healthy" / "_ampscope"), WAYS[way])
    failing(ampscope.open_run(tmp_path / "failing" / "_ampscope"))


def healthy(run: ampscope.Run, steps: int) -> None:
    assert run.ranks == list(RANKS)
    assert ampscope.diagnose(run).verdict == "healthy"
    assert [row.step for row in run.rows(Table.STEPS)] == [*range(steps)] * len(RANKS)


def failing(run: ampscope.Run) -> None:
    received, own = (run.rows(Table.INCIDENTS, rank=rank)[0] for rank in RANKS)
    assert (own.step, own.replay) == (BAD_STEP, ReplayStatus.EXACT)
    assert (received.step, received.replay) == (BAD_STEP, ReplayStatus.RECEIVED)
