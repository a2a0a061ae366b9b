from __future__ import annotations

import numpy as np

from ampscope.analysis.arrays import MAX_POINTS, make_curve, thin_marks


def test_a_short_curve_is_kept_whole() -> None:
    curve = make_curve(np.arange(5), np.array([1.0, 2.0, 3.0, 2.0, 1.0]))
    assert curve.steps == (0, 1, 2, 3, 4)
    assert curve.values == (1.0, 2.0, 3.0, 2.0, 1.0)
    assert not curve.thinned


def test_values_that_are_not_finite_are_told_apart_not_dropped() -> None:
    curve = make_curve(np.arange(4), np.array([1.0, np.nan, np.inf, 2.0]))
    assert curve.steps == (0, 3)
    assert curve.nonfinite == (1, 2)
    assert curve.nonfinite_count == 2


def test_thinning_keeps_single_spikes_and_both_ends() -> None:
    values = np.sin(np.linspace(0, 20, 100_000))
    values[41_873], values[70_001] = 1e6, -1e6
    curve = make_curve(np.arange(len(values)), values)
    assert len(curve.steps) <= MAX_POINTS + 2
    assert curve.thinned
    assert {0, 41_873, 70_001, 99_999} <= set(curve.steps)
    assert list(curve.steps) == sorted(curve.steps)


def test_a_run_of_nothing_but_nan_still_has_marks() -> None:
    curve = make_curve(np.arange(10_000), np.full(10_000, np.nan))
    assert curve.steps == ()
    assert curve.nonfinite_count == 10_000
    assert 0 < len(curve.nonfinite) <= MAX_POINTS // 2
    assert not curve.is_empty


def test_marks_are_thinned_to_the_first_of_each_pixel() -> None:
    assert thin_marks(np.array([0, 1, 2, 999]), marks=2) == (0, 999)
    assert thin_marks(np.array([], dtype=np.int64)) == ()
