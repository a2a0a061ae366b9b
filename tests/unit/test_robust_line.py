"""The line through noisy points: its slope, its interval, and the test for a trend."""

from __future__ import annotations

import math
import random

import pytest

from ampscope.forecast import autocorrelation, highest_score, noise, robust_line

PLACES = [float(place) for place in range(30)]


def test_a_straight_line_is_found() -> None:
    line = robust_line(PLACES, [2.0 + 0.5 * place for place in PLACES])
    assert (line.slope, line.slope_low, line.slope_high) == (0.5, 0.5, 0.5)
    assert line.at(100.0) == pytest.approx(52.0)
    assert line.reaches(52.0) == pytest.approx(100.0)
    assert line.score > 3.1


def test_outliers_do_not_turn_it() -> None:
    heights = [0.5 * place for place in PLACES]
    heights[3] = heights[17] = 1e6
    assert robust_line(PLACES, heights).slope == pytest.approx(0.5, rel=0.05)


def test_what_does_not_move_has_no_trend() -> None:
    line = robust_line(PLACES, [3.0] * len(PLACES))
    assert (line.slope, line.score) == (0.0, 0.0)
    assert line.reaches(4.0) == math.inf


def test_noise_with_a_memory_counts_for_less() -> None:
    chance = random.Random(1)
    walk = [0.0]
    for _ in PLACES[1:]:
        walk.append(walk[-1] + chance.gauss(0.0, 1.0))
    shuffled = walk[:]
    chance.shuffle(shuffled)
    steps = [a + 0.4 * place for a, place in zip(walk, PLACES, strict=True)]
    jumps = [a + 0.4 * place for a, place in zip(shuffled, PLACES, strict=True)]
    kept, mixed = robust_line(PLACES, steps), robust_line(PLACES, jumps)
    assert kept.slope_high - kept.slope_low > mixed.slope_high - mixed.slope_low
    assert kept.score < mixed.score


def test_the_interval_holds_the_true_slope_nineteen_times_in_twenty() -> None:
    held = 0
    for seed in range(200):
        chance = random.Random(seed)
        line = robust_line(PLACES, [0.1 * place + chance.gauss(0.0, 0.5) for place in PLACES])
        held += line.slope_low <= 0.1 <= line.slope_high
    assert 182 <= held <= 200


def test_autocorrelation_and_noise_by_hand() -> None:
    assert autocorrelation([1.0, -1.0, 1.0, -1.0]) == pytest.approx(-0.75)
    assert autocorrelation([5.0, 5.0, 5.0]) == 0.0
    assert noise([1.0, 2.0, 3.0, 4.0]) == 0.0
    assert noise([1.0, 2.0]) == 0.0
    chance = random.Random(3)
    assert noise([0.1 * n + chance.gauss(0.0, 0.2) for n in range(2000)]) == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("drift", [-0.3, 0.0, 0.05, 0.3])
def test_no_stretch_that_ends_now_has_a_higher_score_than_the_highest(drift: float) -> None:
    chance = random.Random(4)
    heights = [drift * place + chance.gauss(0.0, 1.0) for place in PLACES]
    scores = [robust_line(PLACES[begin:], heights[begin:]).score for begin in range(len(PLACES) - 5)]
    assert highest_score(heights, 6) >= max(*scores, 0.0)
    assert highest_score([2.0**height for height in heights], 6) == highest_score(heights, 6)


def test_the_highest_score_of_a_straight_line_is_its_own() -> None:
    assert highest_score(PLACES, 6) == pytest.approx(robust_line(PLACES, PLACES).score)
    assert highest_score(PLACES[::-1], 6) == 0.0
    assert highest_score(PLACES[:5], 6) == 0.0
