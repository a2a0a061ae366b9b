"""The line of numbers of a cause comes from the evidence, and is not there without."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ampscope.analysis.results import Incident, Tried
from ampscope.report.diagnosis_words import number_line
from ampscope.trace.schema import Change, Trial
from ampscope.trace.vocabulary import Cause
from tests.support.verdicts.by_hand import CLIPPED, OVERFLOW, PRODUCT, QUERY
from tests.support.verdicts.operands import changed


def tried(change: Change, outcome: Trial = Trial.FINITE, **what: Any) -> Tried:
    return Tried(step=294, change=change, outcome=outcome, **what)


def of(cause: Cause, **facts: Any) -> Incident:
    return replace(OVERFLOW, cause=cause, **facts)


def test_an_overflow_says_what_float32_needs_and_what_the_dtype_has() -> None:
    needed = tried(Change.FP32, op_min=-70920.0, op_max=40.0)
    assert number_line(replace(OVERFLOW, tried=(needed,))) == "70,920 needed, 65,504 available in float16"


def test_there_is_no_line_without_numbers_that_say_so() -> None:
    assert number_line(OVERFLOW) == ""
    assert number_line(CLIPPED) == ""
    assert number_line(replace(OVERFLOW, tried=(tried(Change.FP32, op_min=-4.0, op_max=4.0),))) == ""
    assert number_line(replace(OVERFLOW, tried=(tried(Change.FP32, op_min=math.nan, op_max=math.inf),))) == ""
    assert number_line(replace(OVERFLOW, tried=(tried(Change.BF16, op_min=0.0, op_max=1e9),))) == ""
    assert number_line(replace(OVERFLOW, outputs=(), tried=(tried(Change.FP32, op_min=0.0, op_max=1e9),))) == ""


def test_zeros_are_counted_where_none_may_be() -> None:
    given = changed(QUERY, zeros=3, numel=640)
    line = "3 of 640 values are 0; float16 begins at 5.96e-8"
    assert number_line(of(Cause.LOG_ZERO, op="aten.log.default", inputs=(given,))) == line
    whole = changed(QUERY, zeros=0)
    assert number_line(of(Cause.DIV_ZERO, op="aten.div.Tensor", inputs=(whole, given))) == line
    assert number_line(of(Cause.DIV_ZERO, op="aten.div.Tensor", inputs=(given, whole))) == ""


def test_zeros_of_what_is_divided_say_nothing() -> None:
    given, whole = changed(QUERY, zeros=3, numel=640), changed(QUERY, zeros=0)
    for op in ("aten.fmod.Tensor", "aten.remainder.Tensor"):
        assert number_line(of(Cause.DIV_ZERO, op=op, inputs=(given, whole))) == ""
        assert number_line(of(Cause.DIV_ZERO, op=op, inputs=(whole, given))).startswith("3 of 640")
    assert number_line(of(Cause.DIV_ZERO, op="aten.div.Scalar", inputs=(given,))) == ""
    assert number_line(of(Cause.DIV_ZERO, op="aten.std.correction", inputs=(given,))) == ""
    assert number_line(of(Cause.DIV_ZERO, op="aten.rsqrt.default", inputs=(given,))).startswith("3 of 640")


def test_each_cause_has_its_own_line() -> None:
    fits = (tried(Change.SCALE, scale=128.0), tried(Change.SCALE, scale=512.0))
    worse = tried(Change.SCALE, Trial.NONFINITE, scale=1024.0)
    assert number_line(of(Cause.SCALE_OVERFLOW, tried=(*fits, worse))) == (
        "512 (2\u2079) is a loss scale that this step fits in"
    )
    below = of(Cause.SQRT_NEGATIVE, op="aten.sqrt.default", inputs=(changed(QUERY, min=-1e-7),))
    assert number_line(below) == "-1e-7 given to sqrt, at least 0 needed"
    near = of(Cause.NEAR_OVERFLOW, headroom_bits=1.0)
    assert number_line(near) == "32,752 reached, 65,504 available in float16"
    came_in = of(Cause.BAD_INPUT, inputs=(), outputs=(changed(PRODUCT, nan=2, posinf=0, numel=128),))
    assert number_line(came_in) == "2 NaN among 128 values"
