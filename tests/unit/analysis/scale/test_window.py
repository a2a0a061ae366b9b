"""At which loss scales gradients fit float16, of gradients whose every value is known."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ampscope import open_run
from ampscope.analysis.scale.window import ScaleWindow, scale_window
from ampscope.trace.schema import Node, Phase, Source
from tests.support.trace_builder import TraceBuilder
from tests.support.verdicts.counted import SMALL, statistics_of, with_gradient


def window_of(trace: TraceBuilder, at: float | None = None) -> ScaleWindow:
    with open_run(trace.close()) as run:
        return scale_window(run, 0, at=at)


@pytest.mark.parametrize("scale", [1.0, 2.0**9])
def test_a_window_has_the_ends_that_the_values_give(tmp_path: Path, scale: float) -> None:
    trace = TraceBuilder(tmp_path)
    values = SMALL * scale
    with_gradient(trace, values, scale=scale)
    window = window_of(trace)
    lost = [sum(SMALL * 2.0**power <= 2.0**-25) / SMALL.size for power in range(24)]
    smallest = next(power for power, share in enumerate(lost) if share <= 0.01)
    # seen in float16 at this scale, what lies below its normals may hide what is lost; then those are kept too
    hidden = (values < 2.0**-14).mean() > 0.01
    assert window.low == 2.0 ** (smallest + (11 if hidden else 0))
    assert window.exact is not hidden
    assert window.high == 2.0 ** math.floor(math.log2(65520 / SMALL.max()))
    assert (window.limited_by, window.unmeasured) == ("fc.weight", 0)


def test_each_scale_says_what_it_loses(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    with_gradient(trace, SMALL * 1024, scale=1024.0)
    told = window_of(trace, at=3.0).at_scale
    assert {3.0, 1.0, 4096.0} <= {each.scale for each in told}
    for each in told:
        scaled = SMALL * each.scale
        assert each.lost_share == pytest.approx((scaled <= 2.0**-25).mean(), abs=0.005)
        below = (scaled < 2.0**-14 - 2.0**-25).mean() - (scaled <= 2.0**-25).mean()
        assert each.subnormal_share == pytest.approx(below, abs=0.005)
        assert each.overflow_share == pytest.approx((scaled >= 65520).mean(), abs=0.005)


def test_float32_gradients_ask_for_no_scale(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    with_gradient(trace, SMALL * 2.0**20, scale=2.0**20)
    node = trace.site(Node.GRADIENT, name="norm.weight", module="norm", in_dtypes=(), out_dtypes=("float32",))
    trace.param("norm.weight")
    trace.op(node, step=0, source=Source.LIVE, **statistics_of(SMALL * 2.0**-30))
    window = window_of(trace)
    other = next(one for one in window.parameters if one.parameter == "norm.weight")
    assert (other.passes_half, other.low, other.high) == (False, None, None)
    assert window.low == 32.0  # of 1,000 values, one is flushed there


def test_an_infinite_gradient_does_not_fit_its_scale(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    with_gradient(trace, np.array([1.0, 3.0, np.inf]), scale=4096.0)
    assert window_of(trace).high == 2048.0


def test_what_was_not_counted_is_not_known(tmp_path: Path) -> None:
    trace = TraceBuilder(tmp_path)
    trace.param("fc.weight")
    back = trace.site(phase=Phase.BACKWARD)
    trace.step(scale=8.0)
    bare = dict.fromkeys(("nan", "posinf", "neginf", "zeros", "subnormals", "max_finite", "exp_low", "exp_counts"))
    trace.op(back, source=Source.LIVE, min=-16.0, max=2.0, **bare)
    window = window_of(trace)
    assert (window.low, window.zero_share, window.at_scale, window.unmeasured) == (None, None, (), 1)
    assert window.high == 2.0 ** math.floor(math.log2(65520 / 2))
    assert window.limited_by == "mm in fc, backward"


def test_a_run_without_steps_has_no_window(tmp_path: Path) -> None:
    assert window_of(TraceBuilder(tmp_path)) == ScaleWindow()
