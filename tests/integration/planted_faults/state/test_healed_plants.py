"""With ``heal=True`` a planted fault does not end a training: finite to its end, its scale kept, near to float32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import ampscope
from ampscope.trace.vocabulary import Severity
from tests.integration.planted_faults.models import ARCHITECTURES, Architecture
from tests.integration.planted_faults.table import BF16, FP16, PLANTS, Plant
from tests.integration.planted_faults.training import BAD_STEP, CALIBRATED, Loop

STEPS = 12
#: Of the loss of the same training in float32.
NEAR = 0.02
#: Where float32 has the fault, too: there is nothing to be near to.
IN_EVERY_DTYPE = frozenset(
    {
        "zero row under a norm without eps",
        "zero row under a root, in backward",
        "row without attention",
        "NaN row in the batch",
        "no label counts",
        "log of a zero probability",
        "poisoned buffer",
        "NaN weight",
        "bit flip in an activation",
        "silence under a phase transform",
    }
)


def trained(where: Architecture, dtype: torch.dtype, plant: Plant, folder: Path | None) -> tuple[float, Any, Loop]:
    """Trains through the fault; returns the loss of one more batch after it, the model and the loop."""
    torch.manual_seed(0)
    model: Any = where.build()
    if plant.insert is not None:
        model.set_submodule(where.norm, plant.insert(model.get_submodule(where.norm)))
    loop = Loop.of(model, dtype, init_scale=CALIBRATED)
    watched = ampscope.watch(model, loop.scaler, dir=folder, quiet=True, heal=True) if folder else nullcontext()
    with watched:
        for step in range(STEPS):
            bad = step == BAD_STEP
            batch = plant.spoil(where.batch()) if bad else where.batch()
            with plant.armed(model, where) if bad else nullcontext():
                loop.step(batch, plant, bad=bad)
    with torch.no_grad():
        loss = float(model.eval()(**where.batch()).loss)
    return loss, model, loop


def in_float32(where: Architecture, plant: Plant) -> float:
    """The same training with float32 wherever half precision was asked for."""
    half = torch.Tensor.half
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "half", torch.Tensor.float)
        assert torch.Tensor.half is not half
        return trained(where, torch.float32, plant, None)[0]


def _cases() -> Iterator[object]:
    for number, plant in enumerate(PLANTS):
        fitting = [where for where in ARCHITECTURES if plant.fits(where)]
        for where in fitting:
            for dtype in plant.dtypes:
                quick = where is fitting[(number + 1) % len(fitting)] and dtype is plant.dtypes[-1]
                name = f"{plant}-{where}-{str(dtype).removeprefix('torch.')}"
                yield pytest.param(plant, where, dtype, id=name, marks=() if quick else pytest.mark.plants_full)


@pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported")  # the one in float32
@pytest.mark.parametrize(("plant", "where", "dtype"), list(_cases()))
def test_a_planted_training_goes_on(plant: Plant, where: Architecture, dtype: torch.dtype, run_folder: Path) -> None:
    loss, model, loop = trained(where, dtype, plant, run_folder)
    assert math.isfinite(loss)
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values() if value.is_floating_point())
    assert dtype is BF16 or loop.scaler.get_scale() == CALIBRATED
    diagnosis = ampscope.diagnose(run_folder)
    assert {each.step for each in diagnosis.incidents if each.severity is not Severity.INFO} <= {BAD_STEP}
    assert [cure.step for cure in diagnosis.cures] == [BAD_STEP] * (plant.name != "no label counts")
    if dtype is FP16 and plant.name not in IN_EVERY_DTYPE:
        assert loss == pytest.approx(in_float32(where, plant), rel=NEAR)
