"""What is taken of a step as it runs is what a replay takes, for as many tensors as there is room for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ampscope.capture.tracing.full_statistics import Census
from ampscope.capture.tracing.light_statistics import Slots
from ampscope.capture.tracing.sampled_shapes import Shapes, together
from ampscope.capture.tracing.selection import MOST_OUTPUTS, MOST_PARAMETERS, Rotation, Selection
from ampscope.capture.tracing.sites import Sites
from ampscope.trace.schema import Statistics


def rotation() -> Rotation:
    return Rotation(Selection(Sites(0, str)))


def both(tensor: Tensor) -> tuple[Statistics, Statistics]:
    """What a replay says of a tensor, and what the real step does."""
    census, slots, shapes = Census(), Slots(), Shapes(rotation())
    census.measure(tensor)
    number = slots.measure(tensor)
    assert number is not None
    shapes.offer(0, number, tensor, chosen=False)
    sampled = shapes.read()
    seen = slots.read()[number]
    return census.read()[0], together(seen, sampled[number]) if sampled else seen


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.linspace(-3.0, 3.0, 20_000).half() * 1e-5, id="many subnormals"),
        pytest.param(torch.linspace(-1.0, 1.0, 6300).reshape(70, 90).t(), id="transposed"),
        pytest.param(torch.full((3, 5), -1e30).bfloat16(), id="bfloat16"),
        pytest.param(torch.zeros(7).half(), id="zeros"),
        pytest.param(torch.tensor(1e200, dtype=torch.float64), id="a number of float64"),
        pytest.param(torch.linspace(-400, 400, 99).to(torch.float8_e4m3fn), id="float8"),
        pytest.param(torch.nn.Parameter(torch.linspace(0.0, 1.0, 9)), id="a parameter"),
    ],
)
def test_it_is_what_a_replay_takes(tensor: Tensor) -> None:
    replayed, live = both(tensor)
    assert live._replace(top_values=None, block_falls=None) == replayed
    assert live.exp_counts is not None or not live.max_finite


def test_integers_have_extremes_alone() -> None:
    assert both(torch.arange(5))[1] == Statistics(0.0, 4.0)


def test_of_what_is_not_finite_a_sample_tells_nothing() -> None:
    seen = both(torch.tensor([1.0, math.inf]))[1]
    assert seen == Statistics(1.0, math.inf)


def test_there_is_room_for_so_many_outputs_and_for_those_that_were_chosen() -> None:
    shapes, tensor = Shapes(rotation()), torch.ones(3)
    for number in range(MOST_OUTPUTS + 5):
        shapes.offer(number, number, tensor, chosen=False)
    shapes.offer(0, MOST_OUTPUTS + 5, tensor, chosen=True)
    assert sorted(shapes.read()) == [*range(MOST_OUTPUTS), MOST_OUTPUTS + 5]


def test_every_site_has_its_turn_and_what_is_near_a_limit_always() -> None:
    turning, sites, near = rotation(), 1000, 777
    turning.pass_on(sites, [near])
    turns = []
    for _ in range(5):
        turns.append({site for site in range(sites) if turning.chooses(site)})
        turning.pass_on(sites, [near])
    assert all(near in turn and len(turn) <= MOST_OUTPUTS for turn in turns)
    assert set().union(*turns[:4]) == set(range(sites))


def test_every_parameter_has_its_turn() -> None:
    turning, names = rotation(), [f"p{number}" for number in range(40)]
    seen: set[str] = set()
    for _ in range(3):
        turn = turning.parameters(names)
        assert len(set(turn)) == MOST_PARAMETERS
        seen |= set(turn)
        turning.pass_on(1, [])
    assert seen == set(names)
    assert turning.parameters(names[:3]) == names[:3]
