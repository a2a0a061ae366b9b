"""With ``heal=True`` a planted fault does not end a training: finite to its end, its scale kept, near to float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ampscope
from ampscope.trace.vocabulary import Severity
from tests.integration.planted_faults.models import ARCHITECTURES, Architecture
from tests.integration.planted_faults.state import healed_training as trainings
from tests.integration.planted_faults.table import PLANTS, Plant
from tests.integration.planted_faults.training import BAD_STEP

#: Of the loss of the same training in float32.
NEAR = 0.02
#: Losses that are learned to zero differ by rounding alone, as a share.
SMALL = 0.005
#: What is finite is made as it was, and cured from the next step on: one step of forty is another.
CURED_FROM_THE_NEXT = {"overflow in a square that is made zero": 0.04}
#: Faults that stay, in the ordinary run: cures of one step, which each step needs again, and of the loop itself.
LASTING_QUICK = ("NaN weight", "log of a zero probability", "loss scale that is too small")
#: Faults of one step, in the ordinary run: every other one.
QUICK = tuple(map(str, PLANTS[::2]))
#: Of these float32 has no number either while they last.
NOT_IN_FLOAT32 = {("overflow in a cast before the MLP", "mamba")}


def _cases(plants: tuple[Plant, ...], quick: tuple[str, ...]) -> Iterator[object]:
    for number, plant in enumerate(plants):
        fitting = [where for where in ARCHITECTURES if plant.fits(where)]
        for where in fitting:
            for dtype in plant.dtypes:
                chosen = where is fitting[(number + 1) % len(fitting)] and dtype is plant.dtypes[-1]
                marks = () if chosen and plant.name in quick else pytest.mark.plants_full
                name = f"{plant}-{where}-{str(dtype).removeprefix('torch.')}"
                yield pytest.param(plant, where, dtype, id=name, marks=marks)


def _is_as_in_float32(
    plant: Plant, where: Architecture, dtype: torch.dtype, healed: trainings.Trained, *, lasting: bool
) -> None:
    assert healed.is_finite
    wide = trainings.in_float32(where, plant, lasting=lasting).loss
    rounding, scale = 0.0, math.inf
    if len(plant.dtypes) > 1:
        by_hand = trainings.by_hand(where, dtype, plant, lasting=lasting)
        rounding = abs(by_hand.loss - wide) if math.isfinite(by_hand.loss) else 0.0  # in a loss near zero
        scale = by_hand.scale
    assert trainings.keeps_scale(plant, dtype, healed.scale, by_hand=scale)
    near = CURED_FROM_THE_NEXT.get(plant.name, NEAR)
    assert healed.loss == pytest.approx(wide, rel=near, abs=max(SMALL, 2 * rounding))


@pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported")  # the one in float32
@pytest.mark.parametrize(("plant", "where", "dtype"), list(_cases(PLANTS, QUICK)))
def test_a_planted_training_goes_on(plant: Plant, where: Architecture, dtype: torch.dtype, run_folder: Path) -> None:
    _is_as_in_float32(plant, where, dtype, trainings.healed(where, dtype, plant, run_folder), lasting=False)
    diagnosis = ampscope.diagnose(run_folder)
    assert {each.step for each in diagnosis.incidents if each.severity is not Severity.INFO} <= {BAD_STEP}
    assert [cure.step for cure in diagnosis.cures] == [BAD_STEP] * (plant.name != "no label counts")


@pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported")
@pytest.mark.parametrize(("plant", "where", "dtype"), list(_cases((*PLANTS, *trainings.OF_LOOPS), LASTING_QUICK)))
def test_a_training_whose_fault_stays_goes_on(
    plant: Plant, where: Architecture, dtype: torch.dtype, run_folder: Path
) -> None:
    if (plant.name, where.name) in NOT_IN_FLOAT32:
        pytest.skip("the fault overflows float32, too, as long as it lasts")
    _is_as_in_float32(
        plant, where, dtype, trainings.healed(where, dtype, plant, run_folder, lasting=True), lasting=True
    )
