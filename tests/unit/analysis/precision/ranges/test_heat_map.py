"""The heat map of ranges: a tree of modules by sampled steps, from traces written by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ampscope import open_run
from ampscope.analysis.precision.ranges.heat_map import HeatMap, HeatRow, Measure, View, groups, heat_map
from ampscope.analysis.precision.ranges.measured import MeasuredRun, measured_places
from ampscope.analysis.precision.ranges.places import ALL, ValueKind
from ampscope.trace.schema import Node, Phase, ReplayStatus, Source
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.growing import RATE, UNMEASURED, growing

TOP = math.log2(65504.0)


def measured(folder: Path) -> MeasuredRun:
    with open_run(folder) as run:
        return measured_places(run)


def row(seen: HeatMap, module: str) -> HeatRow:
    (only,) = (each for each in seen.rows if each.module == module)
    return only


def nested(folder: Path, *, steps: int = 4) -> TraceBuilder:
    """Two blocks with a module of modules each; the second grows, and an op stands outside every module."""
    trace = TraceBuilder(folder)
    sites = [
        trace.site("aten.mm.default", module=name) for name in ("h.0.mlp.fc", "h.0.attn", "h.1.mlp.fc", "h.1.attn", "")
    ]
    for step in range(steps):
        trace.step(traced=Source.LIVE)
        for number, site in enumerate(sites):
            high = 2.0 ** (number + (2 * step if number == 2 else 0)) * (1.0 + step / 64)
            trace.op(site, step=step, source=Source.LIVE, min=0.0, max=high, **UNMEASURED)
    return trace


def test_a_cell_is_the_headroom_of_the_closest_place(run_folder: Path) -> None:
    found = measured(growing(run_folder).close())
    seen = heat_map(found)
    assert [each.module for each in seen.rows] == ["blocks", "blocks.1", "blocks.0"]
    grown = row(seen, "blocks.1")
    steps = np.arange(0, 200, 5)
    assert [(each.first, each.last) for each in seen.columns] == [(step, step) for step in steps.tolist()]
    assert grown.values == pytest.approx(TOP - np.log2(8.0 * RATE**steps))
    assert {found.places[number].place.op for number in grown.closest} == {"aten.add.Tensor"}
    assert grown.worst == 39
    assert row(seen, "blocks").values == pytest.approx(np.fmin(grown.values, row(seen, "blocks.0").values))


def test_what_cannot_grow_has_no_cell(run_folder: Path) -> None:
    found = measured(growing(run_folder).close())
    ops = {found.places[number].place.op for each in heat_map(found).rows for number in each.closest}
    assert ops == {"aten.add.Tensor", "aten.mm.default"}


def test_modules_fold_at_a_depth_and_parents_have_the_least_below_them(run_folder: Path) -> None:
    found = measured(nested(run_folder).close())
    whole = heat_map(found)
    assert [(each.module, each.depth) for each in whole.rows] == [
        *(("h", 0), ("h.0", 1), ("h.0.mlp", 2), ("h.0.mlp.fc", 3), ("h.0.attn", 2)),
        *(("h.1", 1), ("h.1.mlp", 2), ("h.1.mlp.fc", 3), ("h.1.attn", 2), ("", 0)),
    ]
    folded = heat_map(found, View(depth=2))
    assert [each.module for each in folded.rows] == ["h", "h.0", "h.1", ""]
    assert [each.folded for each in folded.rows] == [0, 2, 2, 0]
    assert (row(folded, "h.1").values == row(whole, "h.1").values).all()
    assert row(folded, "h").values[-1] == row(whole, "h.1.mlp.fc").values[-1]
    assert (folded.depth, folded.deepest) == (2, 4)


def test_as_deep_as_rows_fit(run_folder: Path) -> None:
    found = measured(nested(run_folder).close())
    assert [heat_map(found, View(most=most)).depth for most in (10, 9, 7, 4, 2)] == [4, 3, 3, 2, 1]
    few = heat_map(found, View(depth=4, most=3))
    assert [each.module for each in few.rows] == ["h", "h.1", "h.1.mlp"]
    assert few.left_out == 7


def test_the_closest_first_leaves_out_the_modules_that_hold_others(run_folder: Path) -> None:
    found = measured(nested(run_folder).close())
    seen = heat_map(found, View(closest_first=True))
    assert [each.module for each in seen.rows] == ["h.1.mlp.fc", "", "h.1.attn", "h.0.attn", "h.0.mlp.fc"]


def test_near_is_what_warnings_call_near(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    near, far = trace.site("aten.mm.default", module="a"), trace.site("aten.mm.default", module="b")
    back = trace.site("aten.mm.default", module="a", phase=Phase.BACKWARD)
    for step in range(3):
        trace.step(traced=Source.LIVE, scale=8.0)
        for site, high in ((near, 32760.0), (far, 32740.0), (back, 60000.0)):
            trace.op(site, step=step, source=Source.LIVE, min=0.0, max=high + step, **UNMEASURED)
    found = measured(trace.close())
    seen = heat_map(found)
    assert row(seen, "a").near.tolist() == [True, True, True]
    assert row(seen, "b").near.tolist() == [False, False, False]
    assert not heat_map(found, View(group=ValueKind.BACKWARD)).rows[0].near.any()  # a loss scale makes room by itself


def test_what_overflowed_is_marked_at_its_step(run_folder: Path) -> None:
    trace = growing(run_folder)
    site = trace.site("aten.exp.default", module="blocks.2")
    entry = trace.site(Node.INPUT, name="x", in_dtypes=())
    trace.step(step=200, scale=1024.0, skipped=True)
    trace.incident(step=200, replay=ReplayStatus.EXACT)
    trace.op(entry, step=200, source=Source.REPLAY, min=0.0, max=12.0)
    trace.op(site, step=200, source=Source.REPLAY, min=0.0, max=math.inf, posinf=1, max_finite=2.0**14)
    trace.edge(0, 1, step=200)
    seen = heat_map(measured(trace.close()))
    first = row(seen, "blocks.2")
    assert first.overflowed.tolist() == [False] * 40 + [True]
    assert (first.values[-1], first.worst) == (0.0, 40)
    assert heat_map(measured(run_folder), View(closest_first=True)).rows[0].module == "blocks.2"


def test_underflow_and_subnormal_shares(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    site = trace.site("aten.mm.default", module="a")
    for step in range(3):
        trace.step(traced=Source.LIVE)
        counts = {"zeros": 20, "subnormals": 8 * step} if step else UNMEASURED
        trace.op(site, step=step, source=Source.LIVE, numel=100, min=0.0, max=2.0 ** (-10 - 3 * step), **counts)
    found = measured(trace.close())
    assert heat_map(found, View(measure=Measure.UNDERFLOW)).rows[0].values.tolist() == [4.0, 1.0, -2.0]
    shares = heat_map(found, View(measure=Measure.SUBNORMAL)).rows[0]
    assert shares.values.tolist()[1:] == pytest.approx([0.1, 0.2])
    assert math.isnan(shares.values[0])
    assert (shares.closest.tolist(), shares.worst) == ([-1, 0, 0], 2)


def test_of_very_many_steps_neighbours_share_a_column_and_no_extreme_is_lost(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    site = trace.site("aten.mm.default", module="a")
    for step in range(600):
        trace.step(traced=Source.LIVE)
        high = 5000.0 if step == 301 else 3.0 + step % 3
        trace.op(site, step=step, source=Source.LIVE, min=0.0, max=high, **UNMEASURED)
    seen = heat_map(measured(trace.close()))
    assert len(seen.columns) <= ALL
    assert sum(each.steps for each in seen.columns) == 600
    only = seen.rows[0]
    assert seen.columns[only.worst].first <= 301 <= seen.columns[only.worst].last
    assert only.values[only.worst] == pytest.approx(TOP - math.log2(5000.0))
    assert sorted(only.values)[1] == pytest.approx(TOP - math.log2(5.0))


def test_groups_tell_what_kind_of_values_a_place_holds(run_folder: Path) -> None:
    trace = growing(run_folder)
    nodes = ((Node.GRADIENT, "fc.weight"), (Node.STATE_AFTER, "exp_avg of fc.weight"), (Node.INPUT, "x"))
    for op, name in nodes:
        trace.op(trace.site(op, name=name, in_dtypes=()), step=5, source=Source.LIVE, **UNMEASURED)
    found = measured(trace.close())
    assert groups(found) == tuple(ValueKind)
    by_op = {each.place.op: each.place.group for each in found.places if each.place.is_node}
    assert by_op[Node.GRADIENT] == ValueKind.GRADIENTS
    assert by_op[Node.STATE_AFTER] == ValueKind.STATE
    assert by_op[Node.INPUT] == ValueKind.FORWARD
    assert by_op[Node.PARAMETER] == ValueKind.WEIGHTS


def test_a_run_without_traced_ops_has_an_empty_map(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    seen = heat_map(measured(trace.close()))
    assert (seen.rows, seen.columns, seen.left_out) == ((), (), 0)
