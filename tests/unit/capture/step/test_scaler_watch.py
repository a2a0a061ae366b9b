"""The history of a GradScaler, event by event, against what the loop itself reads from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ampscope
from ampscope.capture.step import step_watch
from ampscope.trace.schema import ScalerAction, ScalerEventRow, Table
from tests.support.training.small_loop import BATCH, WIDTH, make_scaler, mlp, mse
from tests.support.training.step_traces import line_of
from tests.support.training.twin_runs import Watched, train_both


class Bench:
    """A training that notes the scale before and after each update."""

    def __init__(self, watch: Callable[..., object], **scaler: Any) -> None:
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.scaler = make_scaler(**scaler)
        self.scales: list[tuple[float, float]] = []
        watch(self.model, self.scaler)

    def backward(self, gain: float = 1.0) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mse(self.model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
        (self.scaler.scale(loss) * gain).backward()

    def step(self, gain: float = 1.0) -> None:
        self.backward(gain)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scales.append((before, self.scaler.get_scale()))


def _events(watched: Watched, *actions: ScalerAction) -> list[ScalerEventRow]:
    rows = watched.run.rows(Table.SCALER_EVENTS)
    return [row for row in rows if row.action in actions] if actions else rows


def _line(row: ScalerEventRow) -> tuple[str, int]:
    return Path(row.file).name, row.line


def _here(function: Callable[..., object], code: str) -> tuple[str, int]:
    return Path(__file__).name, line_of(function, code)


BAD = 2.0**30  #: a gain at which every gradient overflows


def test_growth_backoff_and_skips_have_the_values_the_loop_sees(run_folder: Path) -> None:
    benches: list[Bench] = []

    def loop(watch: Callable[..., object]) -> Any:
        bench = Bench(watch, growth_interval=3, growth_factor=4.0, backoff_factor=0.25)
        for gain in (1, 1, 1, BAD, 1, BAD, BAD, 1, 1, 1):
            bench.step(gain)
        benches.append(bench)
        return [bench.model, bench.optimizer, bench.scaler]

    watched = train_both(loop, run_folder)
    changes = [(n, *pair) for n, pair in enumerate(benches[-1].scales) if pair[0] != pair[1]]
    moves = _events(watched, ScalerAction.GROWTH, ScalerAction.BACKOFF)
    assert [(row.step, row.scale_before, row.scale_after) for row in moves] == changes
    assert [row.action for row in moves] == ["growth", "backoff", "backoff", "backoff", "growth"]
    assert {_line(row) for row in moves} == {_here(Bench.step, "scaler.update()")}
    assert {row.growth_tracker for row in moves} == {0}
    skips = _events(watched, ScalerAction.SKIP)
    assert [row.step for row in skips] == [3, 5, 6]
    assert [row.scale_before for row in skips] == [benches[-1].scales[step][0] for step in (3, 5, 6)]
    assert {_line(row) for row in skips} == {_here(Bench.step, "scaler.step(")}
    assert [row.step for row in watched.steps if row.skipped] == [3, 5, 6]


def test_the_steps_table_has_scale_and_tracker_of_each_step(run_folder: Path) -> None:
    seen: list[tuple[float, int]] = []

    def loop(watch: Callable[..., object]) -> Any:
        bench = Bench(watch, growth_interval=3)
        for gain in (1, 1, 1, 1, BAD, 1, 1):
            bench.backward(gain)
            seen.append((bench.scaler.get_scale(), bench.scaler._get_growth_tracker()))
            bench.scaler.step(bench.optimizer)
            bench.scaler.update()

    watched = Watched.train(loop, run_folder)
    assert [(row.scale, row.growth_tracker) for row in watched.steps] == seen
    assert [row.found_inf for row in watched.steps] == [False] * 4 + [True] + [False] * 2


def test_the_beginning_tells_the_constructors_arguments(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        Bench(watch, init_scale=1024.0, growth_factor=3.0, backoff_factor=0.125, growth_interval=7).step()

    (row,) = _events(Watched.train(loop, run_folder), ScalerAction.INIT)
    assert row.scale_after == 1024.0
    detail = json.loads(row.detail)
    expected = {"init_scale": 1024.0, "growth_factor": 3.0, "backoff_factor": 0.125, "growth_interval": 7}
    assert expected.items() <= detail.items()
    assert detail["enabled"] is True


def test_an_unscale_by_the_loop_is_an_event_one_by_step_is_not(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        bench = Bench(watch)
        bench.step()
        bench.backward()
        bench.scaler.unscale_(bench.optimizer)
        bench.scaler.step(bench.optimizer)
        bench.scaler.update()

    (row,) = _events(Watched.train(loop, run_folder), ScalerAction.UNSCALE)
    assert (row.step, row.optimizer) == (1, 0)
    assert _line(row) == _here(
        test_an_unscale_by_the_loop_is_an_event_one_by_step_is_not, "bench.scaler.unscale_(bench.optimizer)"
    )


def test_setters_tell_what_was_set_and_where(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        bench = Bench(watch)
        bench.step()
        bench.scaler.set_growth_factor(8.0)
        bench.scaler.set_backoff_factor(0.75)
        bench.scaler.set_growth_interval(11)
        return [bench.scaler]

    watched = train_both(loop, run_folder)
    rows = _events(watched, ScalerAction.SETTER)
    assert [json.loads(row.detail) for row in rows] == [
        {"growth_factor": 8.0},
        {"backoff_factor": 0.75},
        {"growth_interval": 11},
    ]
    assert _line(rows[1]) == _here(test_setters_tell_what_was_set_and_where, "set_backoff_factor(")


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_a_scale_set_by_hand_is_told_from_one_that_grew(run_folder: Path, as_tensor: bool) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        bench = Bench(watch, growth_interval=100)
        bench.step()
        bench.backward()
        bench.scaler.step(bench.optimizer)
        bench.scaler.update(torch.tensor(4096.0) if as_tensor else 4096.0)
        bench.step()
        return [bench.model, bench.scaler]

    watched = train_both(loop, run_folder)
    (row,) = _events(watched, ScalerAction.UPDATE, ScalerAction.GROWTH)
    assert row.action == ScalerAction.UPDATE
    assert (row.step, row.scale_before, row.scale_after) == (1, 256.0, 4096.0)
    assert watched.steps[2].scale == 4096.0


def test_state_saved_and_loaded(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        bench = Bench(watch, growth_interval=2)
        bench.step()
        bench.step()
        saved = bench.scaler.state_dict()
        bench.step(BAD)
        bench.scaler.load_state_dict(saved)
        bench.step()
        return [bench.scaler.get_scale(), saved]

    watched = train_both(loop, run_folder)
    saved, *_ = _events(watched, ScalerAction.STATE_SAVED)
    (loaded,) = _events(watched, ScalerAction.STATE_LOADED)
    assert (saved.step, saved.scale_after) == (2, 512.0)
    assert (loaded.step, loaded.scale_after) == (3, 512.0)
    assert json.loads(loaded.detail) == watched.state[1]
    assert _line(loaded) == _here(test_state_saved_and_loaded, "load_state_dict(saved)")
    assert [row.scale for row in watched.steps] == [256.0, 256.0, 512.0, 512.0]


def test_a_scaler_is_found_when_it_first_scales_a_loss(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        bench = Bench(lambda model, scaler: watch(model))
        for _ in range(3):
            bench.step()
        return [bench.model, bench.scaler]

    watched = train_both(loop, run_folder)
    assert [row.scale for row in watched.steps] == [256.0, 256.0, 512.0]
    assert len(_events(watched, ScalerAction.INIT)) == 1


def test_a_second_scaler_goes_on_where_the_first_ended(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        bench = Bench(watch)
        bench.step()
        bench.step()
        bench.scaler = make_scaler(init_scale=2048.0)
        bench.step()
        bench.step(BAD)
        return [bench.model, bench.scaler]

    watched = train_both(loop, run_folder)
    assert [row.scale for row in watched.steps] == [256.0, 256.0, 2048.0, 2048.0]
    assert [(row.scaler, row.step) for row in _events(watched, ScalerAction.INIT)] == [(0, 0), (1, 2)]
    assert [row.scaler for row in _events(watched, ScalerAction.SKIP, ScalerAction.BACKOFF)] == [1, 1]


class Doubling(torch.amp.GradScaler):
    """A subclass that does more than the original, in every method."""

    calls = 0

    def scale(self, outputs: Any) -> Any:
        self.calls += 1
        return super().scale(outputs * 2.0)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls += 10
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self.calls += 100
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        self.calls += 1000
        super().update(new_scale)


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_a_subclass_keeps_its_ways(run_folder: Path, given: bool) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        bench = Bench(lambda *_: None)
        bench.scaler = Doubling("cpu", init_scale=256.0, growth_interval=2)
        watch(bench.model, bench.scaler) if given else watch(bench.model)
        for gain in (1, 1, BAD, 1):
            bench.step(gain)
        return [bench.model, bench.optimizer, bench.scaler, bench.scaler.calls]

    watched = train_both(loop, run_folder)
    assert [row.scale for row in watched.steps] == [256.0, 256.0, 512.0, 256.0]
    assert [row.skipped for row in watched.steps] == [False, False, True, False]


def test_a_disabled_scaler_has_no_scale(run_folder: Path) -> None:
    def loop(watch: Callable[..., object]) -> Any:
        bench = Bench(watch, enabled=False)
        losses = []
        for _ in range(3):
            bench.optimizer.zero_grad()
            loss = mse(bench.model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
            bench.scaler.scale(loss).backward()
            bench.scaler.step(bench.optimizer)
            bench.scaler.update()
            losses.append(loss.item())
        return [bench.model, losses]

    watched = train_both(loop, run_folder)
    assert [(row.scale, row.growth_tracker, row.found_inf, row.skipped) for row in watched.steps] == [
        (None, None, None, False)
    ] * 3
    assert [row.loss for row in watched.steps] == watched.state[1]
    assert not ampscope.diagnose(watched.run).findings


@pytest.mark.filterwarnings("ignore:ampscope. the scaler's history switched itself off")
def test_a_fault_while_a_scaler_is_found_does_not_reach_the_loop(
    monkeypatch: pytest.MonkeyPatch, run_folder: Path
) -> None:
    """A scaler that nobody named joins the run in the middle of the loop's own ``scale``."""

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    with ampscope.watch(model := mlp(), dir=run_folder, quiet=True):
        monkeypatch.setattr(step_watch, "user_place", fail)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), make_scaler()
        loss = mse(model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(ampscope.open_run(run_folder).rows(Table.STEPS)) == 1
