"""How far a step is from float32, and what a trial explains of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ampscope.capture.checks.hidden_overflow import Deviation
from ampscope.capture.rerun.engine import Ran


def run(loss: float = 1.0, **gradients: list[float]) -> Ran:
    return Ran({name: torch.tensor(each) for name, each in gradients.items()}, loss=loss)


WHOLE = run(a=[3.0, 0.0], b=[0.0, 4.0])


def test_distances_are_shares_of_what_float32_has() -> None:
    found = Deviation.between(run(loss=1.5, a=[0.0, 0.0], b=[0.0, 4.0]), WHOLE)
    assert found.total == pytest.approx(3 / 5)
    assert found.of == {"a": 1.0, "b": 0.0}
    assert found.loss == 0.5
    assert found.is_large


def test_roundings_are_not_large() -> None:
    assert not Deviation.between(run(a=[3.01, 0.0], b=[0.0, 3.99]), WHOLE).is_large


def test_a_gradient_that_is_nothing_beside_the_others_is_left_out() -> None:
    whole = run(a=[3.0], noise=[1e-6])
    assert Deviation.between(run(a=[3.0], noise=[-1e-6]), whole).of == {"a": 0.0}


def test_nothing_to_compare_is_no_distance() -> None:
    nothing: dict[str, Tensor] = {}
    assert not Deviation.between(Ran(nothing), Ran(nothing)).is_large


OFF = Deviation(0.2, 0.2, {"a": 0.5, "b": 0.01})


@pytest.mark.parametrize(
    ("left", "names", "of_loss"),
    [
        (Deviation(0.01, 0.0, {"a": 0.01, "b": 0.01}), {"a"}, True),
        (Deviation(0.2, 0.2, {"a": 0.5, "b": 0.01}), set(), False),
        (Deviation(0.15, 0.01, {"a": 0.01, "b": 0.01}), {"a"}, False),
        (Deviation(math.nan, math.nan, {"a": math.nan}), set(), False),
    ],
    ids=["healed", "as far as before", "the loss alone may be chance", "not finite"],
)
def test_what_float32_in_one_place_does_not_heal_is_rounding(left: Deviation, names: set[str], of_loss: bool) -> None:
    assert OFF.explained(left) == names
    assert OFF.of_loss(left) is of_loss


def test_what_is_far_off_and_stays_so_is_rounding_too() -> None:
    far = Deviation(2.0, 8.0, {"a": 2.0})
    assert far.explained(far) == set()
    assert not far.of_loss(far)


def test_one_gradient_of_several_that_heals_may_be_chance() -> None:
    off = Deviation(2.0, 8.0, {"a": 2.0, "b": 2.0, "bias": 0.5})
    assert off.explained(Deviation(2.0, 8.0, {"a": 2.0, "b": 1.8, "bias": 0.1})) == set()
    assert off.explained(Deviation(0.5, 0.1, {"a": 0.1, "b": 0.1, "bias": 0.5})) == {"a", "b"}
