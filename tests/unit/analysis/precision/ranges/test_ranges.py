"""How close values come to the ends of their dtypes, from traces written by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ampscope import open_run
from ampscope.analysis.precision.ranges.measured import MOST_STEPS
from ampscope.analysis.precision.ranges.ranges import RangeRow, Ranges, ranges
from ampscope.report.precision_words import growth
from ampscope.trace.schema import Node, ReplayStatus, Source, Trigger
from tests.support.paths import SAMPLES
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.growing import RATE, UNMEASURED, growing


def measured(folder: Path) -> Ranges:
    with open_run(folder) as run:
        return ranges(run)


def row(found: Ranges, op: str, module: str = "") -> RangeRow:
    (only,) = (each for each in found.rows if each.op == op and module in ("", each.module) and each.scale is None)
    return only


def test_a_run_without_traced_ops_has_no_rows(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    trace.step()
    assert measured(trace.close()) == Ranges(steps=1)


def test_the_closest_comes_first_and_what_cannot_grow_last(run_folder: Path) -> None:
    found = measured(growing(run_folder).close())
    assert (found.steps, found.sampled_steps, found.sampled_share) == (200, 40, 0.2)
    order = [(each.op, each.phase) for each in found.rows]
    assert order == [
        ("aten.add.Tensor", "forward"),
        ("aten.mm.default", "forward"),
        (Node.PARAMETER, "forward"),
        ("aten.mm.default", "backward"),
        ("aten.full.default", "forward"),
        ("aten._softmax.default", "forward"),
    ]
    assert [each.fixed for each in found.rows] == [False, False, False, False, True, True]


@pytest.mark.parametrize(
    ("op", "scalars", "fixed"),
    [
        ("aten.clamp.default", {"min": -4.0, "max": 4.0}, True),
        ("aten.clamp.default", {"min": 0.0}, False),
        ("aten.clamp.default", {"max": 4.0}, False),
        ("aten.clamp_min.default", {"min": 0.0}, False),
        ("aten.sigmoid.default", {}, True),
        ("aten.sigmoid_backward.default", {}, False),
    ],
)
def test_what_cannot_grow_has_both_bounds(op: str, scalars: dict[str, float], fixed: bool, run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    site = trace.site(op, scalars=json.dumps(scalars), out_dtypes=("float16",))
    for step in range(4):
        trace.step(traced=Source.LIVE)
        trace.op(site, step=step, source=Source.LIVE, min=-2.0 - step, max=2.0 + step)
    assert row(measured(trace.close()), op).fixed is fixed


def test_the_numbers_of_a_place_are_those_of_all_its_sites(run_folder: Path) -> None:
    found = row(measured(growing(run_folder).close()), "aten.add.Tensor")
    largest = 8.0 * RATE**195
    assert found.steps == 40
    assert found.largest == pytest.approx(largest)
    assert found.newest == pytest.approx(largest)
    assert found.newest_step == 195
    assert found.headroom_bits == pytest.approx(math.log2(65504.0 / largest))
    assert found.underflow_bits == pytest.approx(math.log2(largest) + 14)
    assert found.bits_per_step == pytest.approx(math.log2(RATE), rel=0.01)
    assert found.source is not None
    assert found.source.line == 12


def test_growth_is_told_with_its_end(run_folder: Path) -> None:
    found = row(measured(growing(run_folder).close()), "aten.add.Tensor")
    end = math.log(65504.0 / 8.0) / math.log(RATE)
    assert found.forecast_step is not None
    assert found.forecast_low is not None
    assert found.forecast_high is not None
    assert abs(found.forecast_step - end) <= 0.05 * end
    assert found.forecast_low <= end <= found.forecast_high


def test_a_few_steps_in_a_row_say_nothing_of_growth(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    site = trace.site("aten.bmm.default")
    for largest in (2.0, 8.0, 4.0, 16.0):
        step = trace.step(traced=Source.LIVE).step
        trace.op(site, step=step, source=Source.LIVE, numel=4, min=-1.0, max=largest)
    found = row(measured(trace.close()), "aten.bmm.default")
    assert found.bits_per_step is None
    assert growth(found) == ""


def test_what_was_not_measured_is_null_and_never_zero(run_folder: Path) -> None:
    found = measured(growing(run_folder).close())
    assert {(each.underflow_share, each.zero_share) for each in found.rows} == {(None, None)}


def test_shares_are_of_what_was_measured(run_folder: Path) -> None:
    trace = growing(run_folder)
    site = trace.site("aten.mul.Tensor")
    trace.op(site, step=5, source=Source.LIVE, min=-1.0, max=1.0, **UNMEASURED)
    trace.op(site, step=10, source=Source.LIVE, numel=100, min=-1.0, max=1.0, zeros=20, subnormals=8)
    trace.op(site, step=10, source=Source.LIVE, numel=100, min=-1.0, max=1.0, zeros=0, subnormals=1)
    found = row(measured(trace.close()), "aten.mul.Tensor")
    assert found.underflow_share == pytest.approx(9 / 180)
    assert found.zero_share == pytest.approx(20 / 200)


def test_zeros_that_float32_would_not_have_had_are_a_share_of_what_was_judged(run_folder: Path) -> None:
    trace = growing(run_folder)
    known, unknown = trace.site("aten.mul.Tensor"), trace.site("aten.bmm.default")
    for step, flushed in ((5, 3), (10, 5), (15, None)):
        facts = {"step": step, "source": Source.LIVE, "numel": 100, "min": -1.0, "max": 1.0, "zeros": 20}
        trace.op(known, **facts, flushed=flushed)
        trace.op(unknown, **facts)
    found = measured(trace.close())
    assert row(found, "aten.mul.Tensor").flushed_share == pytest.approx(8 / 200)
    assert row(found, "aten.bmm.default").flushed_share is None
    assert row(found, "aten.bmm.default").zero_share == pytest.approx(0.2)


@pytest.mark.parametrize("trigger", [Trigger.LOST_GRADIENT, Trigger.NONFINITE_GRADIENT])
def test_zeros_of_a_gradient_are_set_beside_those_of_the_step_in_float32(trigger: Trigger, run_folder: Path) -> None:
    trace = growing(run_folder)
    half, wide = (
        trace.site(Node.GRADIENT, name="fc.weight", phase="", in_dtypes=(dtype,), out_dtypes=(dtype,))
        for dtype in ("float16", "float32")
    )
    for step, status in ((7, ReplayStatus.EXACT), (8, ReplayStatus.DIVERGED)):
        trace.incident(step=step, replay=status, trigger=trigger)
        trace.op(half, step=step, source=Source.REPLAY, numel=100, zeros=40)
        trace.op(wide, step=step, source=Source.REPLAY_FP32, numel=100, zeros=10)
    (found,) = (each for each in measured(trace.close()).rows if each.op == Node.GRADIENT)
    assert found.flushed_share == (pytest.approx(0.3) if trigger == Trigger.LOST_GRADIENT else None)


def test_a_gradient_is_told_with_its_loss_scale_and_without(run_folder: Path) -> None:
    (back,) = (each for each in measured(growing(run_folder).close()).rows if each.phase == "backward")
    assert back.scale == 1024.0
    assert back.newest is not None
    assert back.unscaled == pytest.approx(back.newest / 1024.0)


def test_a_parameter_gradient_carries_the_scale_too(run_folder: Path) -> None:
    trace = growing(run_folder)
    node = trace.site(Node.GRADIENT, name="fc.weight", phase="", in_dtypes=("float32",), out_dtypes=("float32",))
    trace.op(node, step=10, source=Source.LIVE, min=-2048.0, max=1.0, **UNMEASURED)
    (found,) = (each for each in measured(trace.close()).rows if each.op == Node.GRADIENT)
    assert (found.name, found.scale, found.unscaled) == ("fc.weight", 1024.0, 2.0)


def test_the_loss_that_backward_began_with_carries_the_scale() -> None:
    with open_run(SAMPLES / "healthy") as run:
        (loss,) = (each for each in ranges(run).rows if each.op == Node.LOSS)
    assert loss.scale == 4096.0
    assert loss.unscaled == pytest.approx(155.4, abs=0.1)


def test_what_is_not_finite_is_counted_and_does_not_hide_the_rest(run_folder: Path) -> None:
    trace = growing(run_folder)
    masked, broken = trace.site("aten.masked_fill.Scalar"), trace.site("aten.exp.default")
    for step in (0, 5):
        trace.op(masked, step=step, source=Source.LIVE, min=-math.inf, max=32.0 + step, **UNMEASURED)
    trace.op(broken, step=0, source=Source.LIVE, min=1.0, max=4096.0, **UNMEASURED)
    trace.op(broken, step=5, source=Source.LIVE, min=1.0, max=math.inf, **UNMEASURED)
    found = measured(trace.close())
    assert (row(found, "aten.masked_fill.Scalar").largest, row(found, "aten.masked_fill.Scalar").nonfinite) == (37.0, 2)
    assert (row(found, "aten.exp.default").largest, row(found, "aten.exp.default").newest_step) == (4096.0, 0)
    assert row(found, "aten.exp.default").nonfinite == 1


def test_only_replays_that_came_out_the_same_count(run_folder: Path) -> None:
    trace = growing(run_folder)
    site = trace.site("aten.exp.default")
    for step, status in ((7, ReplayStatus.EXACT), (8, ReplayStatus.DIVERGED)):
        trace.incident(step=step, replay=status)
        trace.op(site, step=step, source=Source.REPLAY, min=0.0, max=100.0 * step, **UNMEASURED)
        trace.op(site, step=step, source="replay:fp32", min=0.0, max=1e9, **UNMEASURED)
    found = row(measured(trace.close()), "aten.exp.default")
    assert (found.largest, found.steps) == (700.0, 1)


def test_several_optimizers_have_places_of_their_own(run_folder: Path) -> None:
    trace = growing(run_folder)
    trace.step(optimizer=1, step=0, scale=8.0)
    site = trace.site("aten.exp.default")
    for source, high in (("live", 10.0), ("live@1", 20.0)):
        trace.op(site, step=0, source=source, min=0.0, max=high, **UNMEASURED)
    rows = [each for each in measured(trace.close()).rows if each.op == "aten.exp.default"]
    assert sorted((each.optimizer, each.largest) for each in rows) == [(0, 10.0), (1, 20.0)]


def test_long_runs_are_thinned_and_their_largest_value_is_kept(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    site = trace.site("aten.mm.default")
    for step in range(600):
        trace.step(traced=Source.LIVE)
        high = 5000.0 if step == 301 else 3.0 + step % 3
        trace.op(site, step=step, source=Source.LIVE, min=0.0, max=high, **UNMEASURED)
    found = row(measured(trace.close()), "aten.mm.default")
    assert (found.largest, found.steps, found.newest_step) == (5000.0, 600, 599)
    assert found.forecast_step is None


def test_an_output_that_cannot_be_is_left_out(run_folder: Path) -> None:
    trace = growing(run_folder)
    trace.op(5, step=5, out=-5, source=Source.LIVE, min=0.0, max=1e30, **UNMEASURED)
    assert row(measured(trace.close()), "aten.add.Tensor").largest == pytest.approx(8.0 * RATE**195)


def test_what_overflowed_has_no_headroom_and_comes_first(run_folder: Path) -> None:
    trace = growing(run_folder)
    site, after = trace.site("aten.exp.default"), trace.site("aten.sum.default")
    mask = trace.site("aten.masked_fill.Scalar", scalars='{"value": -Infinity}')
    entry = trace.site(Node.INPUT, name="x", in_dtypes=())
    facts = {"source": Source.REPLAY, "posinf": 1, "max_finite": 2.0**14}
    for step in (200, 201):
        trace.step(step=step, scale=1024.0, skipped=True)
        trace.incident(step=step, replay=ReplayStatus.EXACT)
        trace.op(entry, step=step, source=Source.REPLAY, min=0.0, max=12.0)
        trace.op(site, step=step, min=0.0, max=math.inf, **facts)
        trace.op(after, step=step, min=math.inf, max=math.inf, source=Source.REPLAY, max_finite=None)
        trace.op(mask, step=step, min=-math.inf, max=1.0, source=Source.REPLAY)
        for read, wrote in ((0, 1), (1, 2), (0, 3)):
            trace.edge(read, wrote, step=step)
    found = measured(trace.close())
    assert (found.sampled_steps, found.replayed_steps) == (40, 2)
    first = found.rows[0]
    assert (first.op, first.overflowed, first.headroom_bits) == ("aten.exp.default", 2, 0.0)
    assert (first.largest, first.forecast_step, first.overflowed_at_least) == (2.0**14, None, False)
    assert [each.overflowed for each in found.rows[1:]] == [0] * (len(found.rows) - 1)


def test_a_step_that_was_traced_and_replayed_has_overflowed_once(run_folder: Path) -> None:
    trace = growing(run_folder)
    site, entry = trace.site("aten.exp.default"), trace.site(Node.INPUT, name="x", in_dtypes=())
    trace.step(step=200, scale=1024.0, skipped=True)
    trace.incident(step=200, replay=ReplayStatus.EXACT)
    for source in (Source.LIVE, Source.REPLAY):
        trace.op(entry, step=200, source=source, min=0.0, max=12.0)
        trace.op(site, step=200, min=0.0, max=math.inf, source=source, posinf=1)
        trace.edge(0, 1, step=200, source=source)
    assert measured(trace.close()).rows[0].overflowed == 1


@pytest.mark.parametrize("op", ["aten.log.default", "aten.reciprocal.default"])
def test_what_is_infinite_in_every_dtype_has_not_overflowed(op: str, run_folder: Path) -> None:
    trace = growing(run_folder)
    site, entry = trace.site(op), trace.site(Node.INPUT, name="x", in_dtypes=())
    trace.step(step=200, scale=1024.0, skipped=True)
    trace.incident(step=200, replay=ReplayStatus.EXACT)
    trace.op(entry, step=200, source=Source.REPLAY, min=0.0, max=12.0, zeros=1)
    trace.op(site, step=200, min=-math.inf, max=2.0, source=Source.REPLAY, neginf=1, max_finite=16.0)
    trace.edge(0, 1, step=200)
    assert not any(each.overflowed for each in measured(trace.close()).rows)


def test_of_very_many_overflows_it_is_said_that_there_are_more(run_folder: Path) -> None:
    trace = growing(run_folder)
    site, entry = trace.site("aten.exp.default"), trace.site(Node.INPUT, name="x", in_dtypes=())
    for step in range(200, 201 + MOST_STEPS):
        trace.step(step=step, scale=1024.0, skipped=True)
        trace.incident(step=step, replay=ReplayStatus.EXACT)
        trace.op(entry, step=step, source=Source.REPLAY, min=0.0, max=12.0)
        trace.op(site, step=step, min=0.0, max=math.inf, source=Source.REPLAY, posinf=1)
        trace.edge(0, 1, step=step)
    found = measured(trace.close())
    assert (found.rows[0].overflowed, found.rows[0].overflowed_at_least) == (MOST_STEPS, True)
    assert not any(each.overflowed_at_least for each in found.rows[1:])


def test_what_is_filled_without_being_read_is_left_out(run_folder: Path) -> None:
    trace = growing(run_folder)
    for name in ("aten.bernoulli_.float", "aten.add_.Tensor"):
        entry = trace.site(Node.INPUT, name=f"an operand of {name}", in_dtypes=())
        trace.op(entry, step=5, source=Source.LIVE, min=0.0, max=4.0, **UNMEASURED)
    names = [each.name for each in measured(trace.close()).rows if each.op == Node.INPUT]
    assert names == ["an operand of aten.add_.Tensor"]


def test_fewer_rows_are_the_closest_of_all(run_folder: Path) -> None:
    with open_run(growing(run_folder).close()) as run:
        whole, few = ranges(run), ranges(run, closest=2)
    assert few.rows == whole.rows[:2]
    assert few.places == whole.places == len(whole.rows) == 6


def test_of_a_long_run_only_replays_that_came_out_the_same_count(run_folder: Path) -> None:
    trace = TraceBuilder(run_folder)
    site = trace.site("aten.mm.default")
    for step in range(100):
        trace.step(traced=Source.LIVE)
        trace.op(site, step=step, source=Source.LIVE, min=0.0, max=4.0 + step % 2, **UNMEASURED)
    for step, status, size in ((40, ReplayStatus.EXACT, 64.0), (60, ReplayStatus.DIVERGED, 1024.0)):
        trace.incident(step=step, replay=status)
        trace.op(site, step=step, source=Source.REPLAY, numel=100, min=0.0, max=size, zeros=20, subnormals=8)
        trace.op(site, step=step, source="replay:fp32", min=0.0, max=1e9)
    found = row(measured(trace.close()), "aten.mm.default")
    assert (found.largest, found.largest_step, found.largest_last) == (64.0, 40, 41)
    assert found.underflow_share == pytest.approx(0.1)
    assert found.zero_share == pytest.approx(0.2)
    assert found.steps == 100
