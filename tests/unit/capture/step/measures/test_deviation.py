"""How far a step is from float32, and what a trial explains of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ampscope.capture.replay.results import Regained
from ampscope.capture.step.measures.deviation import Deviation


def run(loss: float = 1.0, **gradients: list[float]) -> Regained:
    return Regained({name: torch.tensor(each) for name, each in gradients.items()}, loss=loss)


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
    assert not Deviation.between(Regained(nothing), Regained(nothing)).is_large


OFF = Deviation(0.2, 0.2, {"a": 0.5, "b": 0.01})


@pytest.mark.parametrize(
    ("left", "names", "of_loss"),
    [
        (Deviation(0.01, 0.0, {"a": 0.01, "b": 0.01}), {"a"}, True),
        (Deviation(0.2, 0.2, {"a": 0.5, "b": 0.01}), set(), False),
        (None, {"a"}, True),
    ],
    ids=["healed", "as far as before", "not tried"],
)
def test_what_float32_in_one_place_does_not_heal_is_rounding(
    left: Deviation | None, names: set[str], of_loss: bool
) -> None:
    assert OFF.explained(left) == names
    assert OFF.of_loss(left) is of_loss


def test_what_is_far_off_is_wrong_whatever_heals_it() -> None:
    far = Deviation(0.9, 0.9, {"a": 0.9})
    assert far.explained(far) == {"a"}
    assert far.of_loss(far)


def test_a_small_part_alone_needs_a_trial() -> None:
    assert Deviation(0.02, 0.0, {"a": 0.5}).explained(None) == set()
