from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from ampscope import open_run
from ampscope.analysis.overview.overview import Milestone, Overview, overview
from ampscope.errors import RunDamaged
from ampscope.trace.schema import EventKind, ScalerAction
from tests.support.trace_builder import TraceBuilder


def test_an_empty_run_gives_an_empty_overview(run_folder: Path) -> None:
    assert overview(open_run(TraceBuilder(run_folder).close())) == Overview()
    assert Overview().skipped_share is None


def test_extent_cost_and_scale_are_read_from_the_steps(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(10):
        trace.step(skipped=step < 2, scale=65536.0 / 2 ** min(step, 2), traced="live" if step == 5 else "")
    seen = overview(open_run(trace.close()))
    assert (seen.steps, seen.first_step, seen.last_step, seen.skipped, seen.traced) == (10, 0, 9, 2, 1)
    assert seen.skipped_share == pytest.approx(0.2)
    assert seen.scale == 16384.0
    assert seen.observing_share == pytest.approx(0.01)
    assert seen.settled_share == pytest.approx(0.01)
    assert seen.skips == (0, 1)
    assert seen.log2_scale.values[:3] == (16.0, 15.0, 14.0)


def test_a_loss_that_is_missing_differs_from_one_that_is_nan(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for loss in (1.0, None, math.nan, -math.inf):
        trace.step(loss=loss)
    curve = overview(open_run(trace.close())).loss
    assert curve.steps == (0,)
    assert curve.nonfinite == (2, 3)


def test_a_scale_of_zero_has_no_logarithm(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step(scale=2.0**-149)
    trace.step(scale=0.0)
    scale = overview(open_run(trace.close())).log2_scale
    assert scale.values == (-149.0,)
    assert scale.nonfinite == (1,)


def test_each_optimizer_and_each_rank_has_its_own_steps(tmp_path: Path) -> None:
    first = TraceBuilder(tmp_path / "run", world_size=2)
    first.step(loss=1.0)
    first.step(optimizer=3, loss=5.0)
    first.close()
    second = TraceBuilder(tmp_path / "run", rank=1, world_size=2)
    second.step(loss=9.0)
    run = open_run(second.close())
    assert overview(run).optimizers == (0, 3)
    assert overview(run).loss.values == (1.0,)
    assert overview(run, optimizer=3).loss.values == (5.0,)
    assert overview(run, rank=1).loss.values == (9.0,)


def test_saves_loads_and_resumes_are_moments_in_order(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.event(EventKind.RESUME, "resumed from last.pt", step=7)
    trace.event(EventKind.TRACED, step=1)
    trace.scaler_event(ScalerAction.STATE_LOADED, step=8)
    trace.scaler_event(ScalerAction.STATE_SAVED, step=4, file="")
    moments = overview(open_run(trace.close())).moments
    assert moments == (
        Milestone(step=4, kind="state_saved", text=""),
        Milestone(step=7, kind="resume", text="resumed from last.pt"),
        Milestone(step=8, kind="state_loaded", text="train.py:10"),
    )


def test_a_damaged_part_is_told_with_its_name(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for _ in range(100):
        trace.step()
    trace.close()
    (part,) = run_folder.glob("rank=0/steps/*.parquet")
    content = bytearray(part.read_bytes())
    content[4:200] = bytes(196)
    part.write_bytes(content)
    with pytest.raises(RunDamaged, match="cannot be read"):
        overview(open_run(run_folder))


@pytest.mark.parametrize(
    ("second", "told"),
    [
        pytest.param(lambda step: 1e-2 if step < 5 else 1e-4, [("1", 1e-4)], id="of its own"),
        pytest.param(lambda step: 1e-3 if step < 5 else 1e-4, [("1", 1e-4)], id="the same at first"),
        pytest.param(lambda step: 1e-3, [], id="the same"),
        pytest.param(lambda step: 1e-2, [], id="always so many times"),
    ],
)
def test_rates_of_groups_that_move_otherwise_are_told(
    second: Callable[[int], float], told: list[tuple[str, float]], run_folder: Path
) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(10):
        rate = second(step)
        trace.step(lr=1e-3, lrs=json.dumps({"0": 1e-3, "1": rate}) if rate != 1e-3 else None)
    with open_run(trace.close()) as run:
        found = overview(run).group_lrs
    assert [(each.group, each.lr.values[-1]) for each in found] == told
    assert all(each.lr.steps == tuple(range(10)) for each in found)


def test_rates_of_groups_are_told_of_some_steps_of_a_long_run(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampscope.analysis.overview.overview._MOST_STEPS", 4)
    trace = TraceBuilder(run_folder)
    for step in range(10):
        trace.step(lr=1e-3, lrs=json.dumps({"0": 1e-3, "1": step * 1e-3}))
    with open_run(trace.close()) as run:
        (found,) = overview(run).group_lrs
    assert found.lr.steps == (0, 3, 6, 9)
    assert found.lr.values == pytest.approx((0.0, 3e-3, 6e-3, 9e-3))


def test_what_observing_costs_once_the_first_steps_are_over_is_told_apart(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    for step in range(10):
        trace.step(duration_s=0.1, observing_s=0.09 if step < 5 else 0.001)
    seen = overview(open_run(trace.close()))
    assert seen.observing_share == pytest.approx(0.455)
    assert seen.settled_share == pytest.approx(0.01)
