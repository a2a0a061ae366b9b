from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampscope import open_run
from ampscope.analysis.replay.op_detail import (
    OpKind,
    find,
    marked,
    neighbourhood,
    op_detail,
    op_line,
    twins,
    with_histograms,
)
from ampscope.analysis.replay.recording import Recording
from ampscope.analysis.replay.timeline import OpDifference, lockstep
from ampscope.trace.schema import Node, Phase
from tests.support.trace_builder import TraceBuilder
from tests.support.traced_steps import linear_step, recorded

HALF, FULL = ("float16",), ("float32",)


@pytest.fixture
def trace(tmp_path: Path) -> TraceBuilder:
    return TraceBuilder(tmp_path / "run")


def ops_of(seen: Recording, places: np.ndarray) -> list[str]:
    return [seen.site_of(int(place)).op for place in places]


def test_a_mask_is_intended_and_not_where_nan_begins(trace: TraceBuilder) -> None:
    low = {"min": -math.inf, "max": 1.0, "neginf": 4}
    fill = '{"value": -Infinity}'
    scores = trace.op(trace.site("aten.bmm.default"))
    mask = trace.op(trace.site("aten.masked_fill.Scalar", scalars=fill), **low)
    moved = trace.op(trace.site("aten.clone.default"), **low)
    soft = trace.op(trace.site("aten._softmax.default"), min=0.0, max=1.0)
    large = trace.op(trace.site("aten.bmm.default"), min=0.0, max=math.inf, posinf=1)
    again = trace.op(trace.site("aten.masked_fill.Scalar", scalars=fill), min=-math.inf, max=math.inf, posinf=1)
    loss = trace.op(trace.site(Node.LOSS, name="loss", module="", phase=Phase.LOSS), min=math.nan, max=math.nan, nan=1)
    for before, after in ((scores, mask), (mask, moved), (moved, soft), (soft, large), (large, again), (again, loss)):
        trace.edge(before, after)
    seen = recorded(trace)
    assert np.flatnonzero(seen.intended).tolist() == [mask, moved]
    assert marked(seen, OpKind.NONFINITE).tolist() == [large]
    assert np.flatnonzero(seen.alarming).tolist() == [large, again, loss]
    line = op_line(seen, mask)
    assert line.is_intended
    assert not line.is_alarming


def test_ops_have_their_magnitudes_and_limits_as_powers_of_two(trace: TraceBuilder) -> None:
    linear_step(trace)
    seen = recorded(trace)
    line = op_line(seen, 3)
    assert line.magnitudes.largest == pytest.approx(math.log2(12.0))
    assert line.magnitudes.smallest == pytest.approx(-2.0)
    assert (line.magnitudes.floor, line.magnitudes.limit) == (-24, 16)
    assert line.magnitudes.headroom == pytest.approx(16 - math.log2(12.0))


def test_a_live_trace_without_counts_still_has_a_largest_magnitude(trace: TraceBuilder) -> None:
    unmeasured = dict.fromkeys(["nan", "posinf", "neginf", "zeros", "subnormals", "max_finite", "min_positive"])
    trace.op(trace.site(), min=-8.0, max=2.0, **unmeasured)
    trace.op(trace.site(), min=4.0, max=16.0, **unmeasured)
    trace.op(trace.site(), min=None, max=None, **unmeasured)
    trace.op(trace.site(), min=-math.inf, max=-math.inf, **unmeasured)
    seen = recorded(trace)
    np.testing.assert_equal(seen.largest, [3.0, 4.0, math.nan, math.nan])
    np.testing.assert_equal(seen.smallest, [math.nan, 2.0, math.nan, math.nan])
    assert seen.nonfinite.tolist() == [False, False, False, True]


def test_an_op_with_several_outputs_is_one_op(trace: TraceBuilder) -> None:
    norm = trace.site("aten.native_layer_norm.default", out_dtypes=FULL * 2)
    trace.op(norm, max=2.0, max_finite=2.0)
    trace.op(norm, seq=0, out=1, max=64.0, max_finite=64.0)
    trace.op(trace.site())
    seen = recorded(trace)
    assert len(seen) == 2
    assert seen.largest[0] == 6.0
    assert [operand.role for operand in op_detail(seen, 0).writes] == ["output 0", "output 1"]


def test_near_the_limit_is_an_eighth_of_what_the_dtype_holds(trace: TraceBuilder) -> None:
    for largest, dtype in ((8000.0, HALF), (8300.0, HALF), (8300.0, FULL), (8300.0, ("int64",))):
        trace.op(trace.site(out_dtypes=dtype, in_dtypes=dtype), max=largest, max_finite=largest)
    assert recorded(trace).near.tolist() == [False, True, False, False]


def test_nan_begins_where_nothing_that_was_read_had_it(trace: TraceBuilder) -> None:
    nan = {"min": math.nan, "max": math.nan}
    clean = trace.op(trace.site())
    born = trace.op(trace.site("aten.log.default"), **nan)
    passed = trace.op(trace.site("aten.add.Tensor"), **nan)
    trace.op(trace.site(Node.GRADIENT, phase=""), **nan)
    for before, after in ((clean, born), (born, passed)):
        trace.edge(before, after)
    seen = recorded(trace)
    assert marked(seen, OpKind.NONFINITE).tolist() == [born]
    assert seen.nonfinite.tolist() == [False, True, True, True]


def test_a_part_of_a_tensor_is_judged_by_its_own_values(trace: TraceBuilder) -> None:
    whole = trace.op(trace.site(), min=-math.inf, max=1.0)
    fine = trace.op(trace.site(), min=math.nan, max=math.nan)
    trace.edge(whole, fine, partial=True, min=0.0, max=1.0)
    assert marked(recorded(trace), OpKind.NONFINITE).tolist() == [whole, fine]


def test_memory_that_is_only_overwritten_begins_nothing(trace: TraceBuilder) -> None:
    garbage = trace.op(trace.site(Node.INPUT, name="buffer"), min=math.nan, max=math.nan)
    filled = trace.op(trace.site("aten.bernoulli_.float"))
    trace.edge(garbage, filled, in_place=True)
    seen = recorded(trace)
    assert not marked(seen, OpKind.NONFINITE).size
    assert not seen.nonfinite.any()
    assert math.isnan(seen.largest[garbage])


def test_conversions_are_marked(trace: TraceBuilder) -> None:
    linear_step(trace)
    assert marked(recorded(trace), OpKind.CAST).tolist() == [2, 9]


def test_ops_are_found_by_any_of_their_words(trace: TraceBuilder) -> None:
    linear_step(trace)
    seen = recorded(trace)
    assert find(seen, "SOFT").tolist() == [4]
    assert find(seen, "fc float16 mm").tolist() == [3, 7, 8]
    assert find(seen, "fc.weight").tolist() == [1, 10]
    assert len(find(seen, " ")) == len(seen)
    assert not len(find(seen, "fc nowhere"))


def test_a_neighbourhood_is_as_long_near_an_end_as_in_the_middle() -> None:
    places = np.arange(0, 100, 2)
    assert neighbourhood(places, 41, 2).tolist() == [38, 40, 42, 44, 46]
    assert neighbourhood(places, 0, 2).tolist() == [0, 2, 4, 6, 8]
    assert neighbourhood(places, 99, 2).tolist() == [90, 92, 94, 96, 98]
    assert neighbourhood(places[:3], 99, 2).tolist() == [0, 2, 4]


def test_an_op_knows_its_other_half(trace: TraceBuilder) -> None:
    linear_step(trace)
    seen = recorded(trace)
    assert ops_of(seen, np.array(twins(seen, 3))) == ["aten.mm.default", "aten.mm.default"]
    assert twins(seen, 7) == twins(seen, 8) == (3,)
    assert twins(seen, 9) == (2,)
    assert twins(seen, 4) == ()


def test_backward_undoes_the_last_execution_first(trace: TraceBuilder) -> None:
    forward = trace.site("aten.mm.default")
    back = trace.site("aten.mm.default", phase=Phase.BACKWARD, forward_site=forward)
    for batch in (0, 1):
        first, second = (trace.op(forward, micro_batch=batch) for _ in range(2))
        undone, undone_last = (trace.op(back, micro_batch=batch) for _ in range(2))
        seen = recorded(trace)
        assert twins(seen, undone) == (second,)
        assert twins(seen, undone_last) == (first,)
        assert twins(seen, first) == (undone_last,)


def test_the_detail_of_an_op_tells_what_it_read_and_who_reads_it(trace: TraceBuilder) -> None:
    linear_step(trace)
    detail = op_detail(recorded(trace), 3)
    assert [line.name or line.op for line in detail.producers] == ["x", "aten._to_copy.default"]
    assert [operand.role for operand in detail.reads] == ["x", "input 1"]
    assert [line.op for line in detail.readers] == ["aten._softmax.default"]
    assert detail.scalars == (("eps", "1e-08"),)
    assert detail.autocast == "float16"


def test_histograms_are_fetched_for_one_op(trace: TraceBuilder) -> None:
    trace.op(trace.site())
    trace.op(trace.site(), exp_low=3, exp_counts=(5, 6))
    seen = recorded(trace)
    (written,) = with_histograms(open_run(trace.folder), seen, 1)
    assert (written.statistics.exp_low, written.exp_counts) == (3, (5, 6))


def test_a_step_of_which_nothing_is_left_is_empty(trace: TraceBuilder) -> None:
    seen = recorded(trace, step=7)
    assert len(seen) == 0
    assert not lockstep(seen, seen).notable.size


def test_equal_steps_have_no_difference(trace: TraceBuilder) -> None:
    linear_step(trace)
    linear_step(trace, step=1)
    found = lockstep(recorded(trace), recorded(trace, step=1))
    assert found.partner.tolist() == list(range(11))
    assert found.first is None
    assert set(found.difference) == {OpDifference.NONE}


def test_steps_part_where_a_value_differs(trace: TraceBuilder) -> None:
    linear_step(trace)
    linear_step(trace, step=1, scores=(-3.0, math.inf))
    linear_step(trace, step=2, scores=(-3.0, 11.0))
    one, other, close = (recorded(trace, step=step) for step in range(3))
    assert lockstep(one, close).of(3) is OpDifference.DIGITS
    assert not lockstep(one, close).notable.size
    assert lockstep(one, other).of(3) is OpDifference.FINITE
    assert lockstep(one, other).first == 3
    assert lockstep(one, other).notable.tolist() == [3]


@pytest.mark.parametrize(
    ("scores", "difference"),
    [
        ((math.nan, math.nan), OpDifference.NONE),
        ((-math.inf, math.inf), OpDifference.KIND),
        ((1.0, math.inf), OpDifference.KIND),
        ((-3.0, 5.0), OpDifference.FINITE),
        ((None, None), OpDifference.NONE),
    ],
)
def test_nan_is_the_same_as_nan_alone(trace: TraceBuilder, scores: tuple[Any, Any], difference: OpDifference) -> None:
    linear_step(trace, scores=(math.nan, math.nan))
    linear_step(trace, step=1, scores=scores)
    one, other = recorded(trace), recorded(trace, step=1)
    assert lockstep(one, other).of(3) is difference
    assert lockstep(other, one).of(3) is difference


def test_ops_that_one_step_alone_has_are_told(trace: TraceBuilder) -> None:
    for step, names in enumerate((("a", "b", "c"), ("a", "c", "c"))):
        for name in names:
            trace.op(trace.site(f"aten.{name}.default"), step=step)
    found = lockstep(recorded(trace), recorded(trace, step=1))
    assert found.partner.tolist() == [0, -1, 2]
    assert found.of(1) is OpDifference.ALONE
    assert found.only_other == 1
