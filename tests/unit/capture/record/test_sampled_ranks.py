"""``watch(ranks=...)``: on which ranks healthy steps are traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ampscope
from ampscope.capture.record.settings import sampled_ranks
from ampscope.errors import WatchError
from ampscope.trace.schema import EventKind, Source, Table
from tests.support.training.training_loop import TrainingLoop


@pytest.mark.parametrize(
    ("asked", "world_size", "ranks"),
    [
        (1, 8, (0,)),
        (2, 8, (0, 4)),
        (3, 8, (0, 2, 5)),
        (100, 4, (0, 1, 2, 3)),
        ("all", 3, (0, 1, 2)),
        ([3, 0, 3], 4, (0, 3)),
        ((1,), 2, (1,)),
        (1, 1, (0,)),
    ],
)
def test_those_asked_for(asked: Any, world_size: int, ranks: tuple[int, ...]) -> None:
    assert sampled_ranks(asked, world_size) == ranks


@pytest.mark.parametrize("asked", [0, -1, True, 1.5, None, "0", "some", [], [0.5], ["0"], [True], {0}])
def test_what_names_no_ranks(asked: Any) -> None:
    with pytest.raises(WatchError, match=r"ranks=.*give ranks such as \[0, 3\], how many of them, or \"all\""):
        sampled_ranks(asked, 8)


@pytest.mark.parametrize("asked", [[4], [0, -1]])
def test_ranks_that_the_job_does_not_have(asked: list[int]) -> None:
    with pytest.raises(WatchError, match="this job has the ranks 0 to 3"):
        sampled_ranks(asked, 4)
    with pytest.raises(WatchError, match="this job has rank 0 alone"):
        sampled_ranks([1], 1)


def test_nothing_is_installed_by_a_call_that_cannot_be_honoured(run_folder: Path) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(WatchError):
        ampscope.watch(model, dir=run_folder, ranks="one")
    assert not run_folder.exists()
    assert type(model) is nn.Linear


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_healthy_steps_of_the_others_are_not_traced(
    every: int | None, rank: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    loop = TrainingLoop()
    with ampscope.watch(loop.model, loop.scaler, dir=run_folder, quiet=True, every=every, ranks=[1]) as scope:
        loop.step(10)
    run = ampscope.open_run(scope.folder)
    traced = [row for row in run.rows(Table.EVENTS, kind=EventKind.TRACED) if row.text == Source.LIVE]
    assert bool(traced) is (rank == "1")
    assert run.manifest.configuration["ranks"] == [1]
