"""A scope takes notes, and says so where it cannot follow the training."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import ampscope
from ampscope.trace.schema import EventKind, Table
from tests.support.training.training_loop import TrainingLoop


@pytest.fixture
def loop() -> TrainingLoop:
    return TrainingLoop()


def test_a_training_in_another_thread_is_recorded_or_missed_aloud(loop: TrainingLoop, watch: Any) -> None:
    scope = watch(loop.model, loop.scaler)
    thread = threading.Thread(target=loop.step, args=(3,))
    thread.start()
    thread.join()
    scope.close()
    run = ampscope.open_run(scope.folder)
    recorded = [row.loss is not None for row in run.rows(Table.STEPS)]
    assert not torch.nn.modules.module._has_any_global_hook()
    assert recorded == [True] * 3 or run.rows(Table.EVENTS, kind=EventKind.WARNING)


def test_notes_stand_on_the_time_line(loop: TrainingLoop, watch: Any) -> None:
    scope = watch(loop.model, loop.scaler)
    loop.step(2)
    scope.note("second data set")
    loop.step()
    scope.close()
    (row,) = ampscope.open_run(scope.folder).rows(Table.EVENTS, kind=EventKind.NOTE)
    assert (row.step, row.text) == (2, "second data set")


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_process_group_that_comes_later_and_knows_better(
    ranks: str, loop: TrainingLoop, watch: Any, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", ranks)
    scope = watch(loop.model, loop.scaler)
    request.getfixturevalue("alone")
    loop.step(3)
    scope.close()
    warnings = ampscope.open_run(scope.folder).rows(Table.EVENTS, kind=EventKind.WARNING)
    assert len(warnings) == (ranks == "2")
    assert all("rank 0 of 1 by its process group, and was rank 0 of 2" in row.text for row in warnings)


def test_the_figures_of_a_run_are_those_of_its_rows(loop: TrainingLoop, watch: Any) -> None:
    scope = watch(loop.model, loop.scaler)
    before = scope.figures()
    loop.step(4)
    scope.close()
    rows = ampscope.open_run(scope.folder).rows(Table.STEPS)
    figures = scope.figures()
    assert (before.steps, before.skipped_share, before.scale, before.observing_share) == (0, None, None, 0.0)
    assert (figures.steps, figures.scale) == (4, rows[-1].scale)
    assert figures.skipped_share == sum(row.skipped for row in rows) / 4
    assert figures.observing_share == pytest.approx(sum(r.observing_s for r in rows) / sum(r.duration_s for r in rows))


@pytest.mark.parametrize("finite", [True, False])
def test_a_closed_scope_keeps_nothing_of_the_model_alive(finite: bool, watch: Any) -> None:
    loop = TrainingLoop()
    scope = watch(loop.model, loop.scaler)
    loop.step(3)
    if not finite:
        with torch.no_grad():
            next(loop.model.parameters()).fill_(float("nan"))
        loop.step(2)
    known: list[weakref.ref[Any]] = [weakref.ref(each) for each in (loop.model, *loop.model.parameters())]
    scope.close()
    del loop
    gc.collect()
    assert [each() for each in known] == [None] * len(known)
    scope.note("afterwards")
    assert scope.figures().steps == (3 if finite else 5)
