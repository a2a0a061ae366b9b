"""Two ranks that communicate inside forward: a replay has what they sent, and asks nobody, whoever is watched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import ampscope
from ampscope.trace.schema import ReplayStatus, Table
from tests.integration.ranks.two_ranks import RANKS
from tests.support.torchrun import on_ranks
from tests.support.training.small_loop import POISONED

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")


def _train(folder: Path, watchers: str) -> list[str]:
    """Runs both ranks; a digest of what each came to."""
    folder.mkdir()
    on_ranks("tests.integration.ranks.two_ranks", folder, watchers, ranks=RANKS)
    return [(folder / f"weights-{rank}").read_text("utf-8") for rank in range(RANKS)]


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
