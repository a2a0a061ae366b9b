"""Growth that will leave a range is told in time, and nothing else is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from ampscope.forecast import (
    Forecast,
    Point,
    bits_per_step,
    forecast,
    forecast_fall,
    forecast_overflow,
    may_reach,
    thinned,
)

LIMIT = math.log2(65504.0)
#: Two per cent a step.
RATE = math.log2(1.02)


def series(
    log: Callable[[float], float],
    steps: int,
    *,
    every: int = 5,
    error: float = 0.05,
    memory: float = 0.3,
    seed: int = 0,
) -> list[Point]:
    """A magnitude at every so many steps, with noise that remembers: its logarithm, as a function of the step."""
    chance, off, points = random.Random(seed), 0.0, []
    for step in range(0, steps, every):
        off = memory * off + chance.gauss(0.0, error * math.sqrt(1 - memory**2))
        points.append((step, log(step) + off))
    return points


def growing_by_factor(step: float) -> float:
    return 3.0 + RATE * step


def growing_by_amount(step: float) -> float:
    return math.log2(16.0 + 131.0 * step)


def growing_as_square(step: float) -> float:
    return math.log2(16.0 + 0.262 * step**2)


GROWTH: dict[Callable[[float], float], float] = {
    growing_by_factor: (LIMIT - 3.0) / RATE,
    growing_by_amount: 499.9,
    growing_as_square: 499.9,
}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("log", GROWTH)
def test_growth_is_forecast_when_a_third_of_the_way_is_seen(log: Callable[[float], float], seed: int) -> None:
    true = GROWTH[log]
    # growth by an equal amount is half done, in bits, after its first steps: of the rest, a third is little
    part = 1 / 2 if log is growing_by_amount else 1 / 3
    found = forecast(series(log, round(true * part), seed=seed), LIMIT)
    assert found is not None
    assert abs(found.step - true) <= 0.2 * true
    assert found.low <= true <= found.high
    assert found.bits_per_step > 0


def steady(step: float) -> float:
    return 12.0


def saturating(step: float) -> float:
    return 8.0 + 5.0 * (1.0 - math.exp(-step / 80.0))


def slowing_down(step: float) -> float:
    return 9.0 + 0.5 * math.log2(1.0 + step)


def falling(step: float) -> float:
    return 15.0 - RATE * step


def jumped(step: float) -> float:
    return 7.0 if step < 200 else 12.0


def warmed_up(step: float) -> float:
    return min(4.0 + 0.08 * step, 11.0)


QUIET = [steady, saturating, slowing_down, falling, jumped, warmed_up]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("error", [0.02, 0.2])
@pytest.mark.parametrize("log", QUIET)
def test_what_does_not_go_on_growing_is_no_forecast(log: Callable[[float], float], error: float, seed: int) -> None:
    assert forecast(series(log, 500, error=error, seed=seed), LIMIT) is None


def test_a_walk_by_chance_is_hardly_ever_a_forecast() -> None:
    told = 0
    for seed in range(200):
        chance, height, points = random.Random(seed), 10.0, []
        for step in range(0, 300, 5):
            height = min(height + chance.gauss(0.0, 0.2), LIMIT - 0.1)
            points.append((step, height))
        told += forecast(points, LIMIT) is not None
    assert told <= 6


def test_the_present_regime_counts() -> None:
    late = [*series(steady, 200), *((200 + step, height - 4.0) for step, height in series(growing_by_factor, 300))]
    points = [(step, height - 5.0) if step < 200 else (step, height + 4.0) for step, height in late]
    found = forecast(points, LIMIT)
    assert found is not None
    assert abs(found.step - (200 + (LIMIT - 3.0) / RATE)) < 60
    assert found.since >= 150


def test_nothing_is_said_too_far_ahead_or_of_too_few_points() -> None:
    assert forecast(series(growing_by_factor, 60), LIMIT) is None
    assert forecast(series(growing_by_factor, 200)[:5], LIMIT) is None
    assert forecast([], LIMIT) is None


def test_what_is_there_already_is_no_forecast() -> None:
    assert forecast(series(growing_by_factor, 500), 10.0) is None


def test_what_comes_up_to_the_size_of_one_has_been_learnt() -> None:
    from_nothing = [(step, -11.0 + 0.07 * step) for step in range(0, 150, 7)]
    assert forecast(from_nothing, 16.0) is not None
    assert forecast_overflow(from_nothing, 16.0) is None
    further = [(step, -11.0 + 0.07 * step) for step in range(0, 240, 7)]
    told = forecast_overflow(further, 16.0)
    assert told is not None
    assert abs(told.step - 27 / 0.07) < 20
    settled = [(step, min(height, 0.8)) for step, height in further]
    assert forecast_overflow(settled, 16.0) is None


def test_a_fall_is_forecast_as_a_rise_is() -> None:
    down = [(step, -height) for step, height in series(growing_by_factor, 200)]
    up = forecast(series(growing_by_factor, 200), LIMIT)
    assert up is not None
    assert forecast_fall(down, -LIMIT) == up._replace(bits_per_step=-up.bits_per_step)


def test_more_points_than_are_looked_at_say_the_same() -> None:
    found = forecast(series(growing_by_factor, 200, every=1), LIMIT)
    assert isinstance(found, Forecast)
    assert abs(found.step - (LIMIT - 3.0) / RATE) < 60


def test_the_rate_is_that_of_all_points() -> None:
    assert bits_per_step([(0, 1.0)]) is None
    assert bits_per_step([(0, 1.0), (10, 2.0)]) == pytest.approx(0.1)
    assert bits_per_step(series(growing_by_factor, 3000)) == pytest.approx(RATE, rel=0.05)


def test_thinning_keeps_few_and_their_middle() -> None:
    assert thinned([(0, 1.0), (1, 2.0)]) == [(0, 1.0), (1, 2.0)]
    assert thinned([(n, float(n)) for n in range(6)], 2) == [(1, 1.0), (4, 4.0)]


def test_the_quick_look_leaves_nothing_out() -> None:
    assert may_reach(series(growing_by_factor, 200), LIMIT)
    assert not may_reach(series(steady, 200), LIMIT)
