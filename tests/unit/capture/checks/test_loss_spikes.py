"""A spike is told from noise, trends and jumps: of losses and gradient norms as they come in."""

from __future__ import annotations

import math
import random

import pytest

from ampscope.capture.checks.loss_spikes import ENOUGH, WINDOW, Band


def taken(values: list[float]) -> list[int]:
    """Where a band finds spikes."""
    band = Band()
    return [place for place, value in enumerate(values) if band.take(value) is not None]


def noise(count: int, spread: float = 0.3) -> list[float]:
    chance = random.Random(7)
    return [math.exp(chance.gauss(0, spread)) for _ in range(count)]


@pytest.mark.parametrize("before", [ENOUGH, 63, 200])
def test_a_value_far_out_is_a_spike_with_what_is_usual(before: int) -> None:
    band = Band()
    for value in noise(before):
        assert band.take(value) is None
    spike = band.take(500.0)
    assert spike is not None
    assert (spike.value, spike.steps) == (500.0, min(before, WINDOW))
    assert 0.8 < spike.usual < 1.2 < spike.highest < 5


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([*noise(ENOUGH - 1), 1e6], id="too few steps to know what is usual"),
        pytest.param([*noise(100), 9.0], id="large, but not by far"),
        pytest.param([100 * 0.9**step for step in range(150)], id="falling"),
        pytest.param([1.1**step for step in range(150)], id="rising"),
        pytest.param([5.0, *[5.0 * 0.5**step for step in range(60)], 0.5], id="back to less than it began with"),
        pytest.param([0.0] * 60 + [0.3] + [0.0] * 30, id="zero but for a row that violates its margin"),
        pytest.param([-1.0, *noise(100), 1e4], id="a loss with a sign has no scale"),
        pytest.param([*noise(100), math.inf, math.nan], id="not finite is another matter"),
        pytest.param(noise(2000, spread=1.0), id="noise over many sizes"),
    ],
)
def test_what_training_does_is_no_spike(values: list[float]) -> None:
    assert taken(values) == []


def test_a_value_far_out_of_a_loss_that_falls_is_a_spike() -> None:
    falling = [value * 0.9**step for step, value in enumerate(noise(60))]
    assert taken([*falling, 1000.0]) == [60]
    assert taken([*falling, 8.0]) == []


def test_a_heavy_tail_is_soon_usual() -> None:
    chance = random.Random(1)
    assert len(taken([1 / chance.random() for _ in range(3000)])) <= 10


def test_a_new_level_is_a_spike_once() -> None:
    assert taken([*noise(80), *(1000 * value for value in noise(80))]) == [80]


def test_what_was_largest_is_forgotten_with_its_window() -> None:
    values = [*noise(40), 1e4, *noise(2 * WINDOW), 1e4]
    assert taken(values) == [40, len(values) - 1]
