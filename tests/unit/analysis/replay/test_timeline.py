from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ampscope.analysis.replay.timeline import OpMark, Spans, Timeline, lockstep, timeline
from ampscope.trace.schema import Cast, Node, Phase
from tests.support.trace_builder import TraceBuilder
from tests.support.traced_steps import linear_step, recorded


@pytest.fixture
def trace(tmp_path: Path) -> TraceBuilder:
    return TraceBuilder(tmp_path / "run")


def rows(drawn: Timeline, depth: int) -> list[tuple[str, int, int]]:
    """Module, first and last op of each span at a depth."""
    spans: Spans = drawn.spans
    return [
        (drawn.modules[module], first, last)
        for first, last, at, module in zip(
            spans.first.tolist(), spans.last.tolist(), spans.depth.tolist(), spans.module.tolist(), strict=True
        )
        if at == depth
    ]


def test_modules_nest_as_their_names_do(trace: TraceBuilder) -> None:
    for module in ("a.x", "a.x", "a.y", "a", "", "b.z.w", "a.y"):
        trace.op(trace.site(module=module))
    drawn = timeline(recorded(trace))
    assert rows(drawn, 0) == [("a", 0, 3), ("b", 5, 5), ("a", 6, 6)]
    assert rows(drawn, 1) == [("a.x", 0, 1), ("a.y", 2, 2), ("b.z", 5, 5), ("a.y", 6, 6)]
    assert rows(drawn, 2) == [("b.z.w", 5, 5)]
    assert drawn.depth == 3
    assert [drawn.modules[at] if at >= 0 else "" for at in drawn.module] == [
        "a.x",
        "a.x",
        "a.y",
        "a",
        "",
        "b.z.w",
        "a.y",
    ]


def test_distances_are_in_bits_and_unknown_where_nothing_was_measured(trace: TraceBuilder) -> None:
    trace.op(trace.site(), min=2.0, max=1024.0, max_finite=1024.0, min_positive=2.0)
    trace.op(trace.site(out_dtypes=("int64",), in_dtypes=("int64",)))
    drawn = timeline(recorded(trace))
    assert (drawn.headroom[0], drawn.spread[0]) == (6.0, 9.0)
    assert math.isnan(drawn.headroom[1])
    assert drawn.dtypes == ("float16",)
    assert drawn.dtype.tolist() == [0, -1]


def test_marks_tell_what_begins_from_what_goes_on_and_what_is_wanted(trace: TraceBuilder) -> None:
    nan = {"min": math.nan, "max": math.nan}
    fill = '{"value": -Infinity}'
    mask = trace.op(trace.site("aten.masked_fill.Scalar", scalars=fill), min=-math.inf, max=1.0, neginf=1)
    born = trace.op(trace.site("aten.log.default"), **nan)
    passed = trace.op(trace.site("aten._to_copy.default", cast=Cast.AUTOCAST), **nan)
    trace.op(trace.site(), max=6e4, max_finite=6e4)
    trace.edge(born, passed)
    found = timeline(recorded(trace)).marks.tolist()
    assert found == [OpMark.INTENDED, OpMark.BAD | OpMark.BORN, OpMark.BAD | OpMark.CAST, OpMark.NEAR]
    assert mask == 0


def test_backward_leads_to_forward_and_forward_and_backward_are_told_apart(trace: TraceBuilder) -> None:
    linear_step(trace)
    drawn = timeline(recorded(trace))
    assert drawn.forward.tolist() == [-1] * 7 + [3, 3, 2, -1]
    assert [(one.name, one.first, one.last) for one in drawn.phases] == [("forward", 0, 5), ("backward", 6, 10)]


def test_several_backward_ops_share_one_forward_op_by_turns(trace: TraceBuilder) -> None:
    forward = trace.site("aten.mm.default")
    back = trace.site("aten.mm.default", phase=Phase.BACKWARD, forward_site=forward)
    lost = trace.site("aten.mul.Tensor", phase=Phase.BACKWARD, forward_site=9999)
    for site in (forward, forward, back, back, back, back, lost):
        trace.op(site)
    trace.op(back, micro_batch=1)
    assert timeline(recorded(trace)).forward.tolist() == [-1, -1, 1, 1, 0, 0, -1, -1]


def test_an_input_is_named_within_its_module(trace: TraceBuilder) -> None:
    trace.op(trace.site(Node.PARAMETER, name="fc.weight", module="fc"))
    trace.op(trace.site(Node.PARAMETER, name="head.weight", module="head"))
    drawn = timeline(recorded(trace))
    assert drawn.ops == ((Node.PARAMETER, "weight"),)
    assert drawn.op.tolist() == [0, 0]


def test_the_other_step_is_measured_against_this_ones_dtype(trace: TraceBuilder) -> None:
    half, full = trace.site("aten.mm.default"), trace.site("aten.mm.default", out_dtypes=("float32",))
    trace.op(half, max=2.0**10, max_finite=2.0**10)
    trace.op(full, step=1, max=2.0**20, max_finite=2.0**20)
    one = recorded(trace)
    drawn = timeline(one, lockstep(one, recorded(trace, step=1)))
    assert drawn.other is not None
    np.testing.assert_equal(drawn.other, [-4.0])
    assert drawn.parted == 0
    assert drawn.marks.tolist() == [OpMark.PARTS]


def test_of_the_other_step_what_is_not_finite_is_told(trace: TraceBuilder) -> None:
    linear_step(trace)
    linear_step(trace, step=1, scores=(-3.0, math.inf))
    one = recorded(trace)
    drawn = timeline(one, lockstep(one, recorded(trace, step=1)))
    assert np.flatnonzero(drawn.marks & int(OpMark.OTHER_BAD)).tolist() == [3]
    assert drawn.parted == 3


def test_a_step_of_which_nothing_is_left_is_empty(trace: TraceBuilder) -> None:
    linear_step(trace)
    drawn = timeline(recorded(trace, step=7))
    assert (len(drawn.seq), drawn.depth, drawn.phases) == (0, 0, ())
