"""A curve as small as a word."""

from __future__ import annotations

import math

import pytest

from ampscope.analysis.arrays import Curve
from ampscope.report.figures.stack import BAD, COLUMNS, HEIGHT, sparkline


def test_it_spans_from_the_least_to_the_largest_value() -> None:
    assert sparkline(Curve(steps=(0, 1, 2), values=(1.0, 3.0, 2.0))) == (0, HEIGHT, HEIGHT // 2)


def test_values_at_the_ends_of_a_float_are_drawn() -> None:
    assert sparkline(Curve(steps=(0, 1), values=(-1.7e308, 1.7e308))) == (0, HEIGHT)
    assert len(sparkline(Curve(steps=(0, 1), values=(0.0, 5e-324)))) == 2


def test_a_value_that_is_not_finite_is_marked_where_it_is() -> None:
    assert sparkline(Curve(steps=(0, 2), values=(1.0, 2.0), nonfinite=(1,))) == (0, BAD, HEIGHT)
    assert sparkline(Curve(nonfinite=(5,))) == (BAD,)


def test_a_level_curve_lies_in_the_middle_and_none_has_no_columns() -> None:
    assert set(sparkline(Curve(steps=(3, 4), values=(7.0, 7.0)))) == {HEIGHT // 2}
    assert sparkline(Curve()) == ()


@pytest.mark.parametrize("steps", [range(1000), range(0, 100_000, 1571)])
def test_a_long_curve_has_few_columns_and_goes_on_where_a_step_is_not_known(steps: range) -> None:
    drawn = sparkline(Curve(steps=tuple(steps), values=tuple(math.log1p(step) for step in steps)))
    assert len(drawn) == COLUMNS
    assert list(drawn) == sorted(drawn)
    assert drawn[-1] == HEIGHT
