"""Trainings through a planted fault: healed, left to it, and as float32 would have gone without it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import ampscope
from tests.integration.planted_faults.faults import AfterNorm
from tests.integration.planted_faults.models import Architecture, Batch
from tests.integration.planted_faults.table import Plant, row_with_itself, without_nan_row, zero_in_weight
from tests.integration.planted_faults.training import BAD_STEP, CALIBRATED, Loop

#: Steps of a training with the fault in one of them, and of one in which it stays.
ONCE, LASTING = 12, 40
#: What is learned by heart, so that a training which stands still is far from one that does not.
BATCHES, RATE = 2, 3e-3


#: What is right in the place of a fault that float32 has, too; for faults in modules these say it themselves.
RIGHT: dict[str, dict[str, Any]] = {
    "row without attention": {"spoil": row_with_itself},
    "NaN row in the batch": {"spoil": without_nan_row},
    "NaN weight": {"armed": zero_in_weight},
    "poisoned buffer": {"armed": lambda *_: nullcontext()},
    "buffer replaced by a poisoned one": {"armed": lambda *_: nullcontext()},
    "bit flip in an activation": {"armed": lambda *_: nullcontext()},
}


class Trained(NamedTuple):
    """What became of a training."""

    loss: float  #: of batches without a fault in them, in float32
    is_finite: bool  #: each weight, each buffer, and the loss
    scale: float


def healed(where: Architecture, dtype: torch.dtype, plant: Plant, folder: Path, *, lasting: bool = False) -> Trained:
    """Trains through a fault with ``heal=True``."""
    return _train(where, dtype, plant, lasting=lasting, folder=folder)


def unhealed(where: Architecture, dtype: torch.dtype, plant: Plant, *, lasting: bool = False) -> Trained:
    """The same unwatched."""
    return _train(where, dtype, plant, lasting=lasting)


def in_float32(where: Architecture, plant: Plant, *, lasting: bool = False) -> Trained:
    """The same in float32, with what is meant in the place of the fault; its scaler skips what is not finite."""
    with _wide():
        right = replace(plant, **RIGHT.get(plant.name, {}))
        return _train(where, torch.float32, right, lasting=lasting, mended=True)


def _train(
    where: Architecture,
    dtype: torch.dtype,
    plant: Plant,
    *,
    lasting: bool,
    folder: Path | None = None,
    mended: bool = False,
) -> Trained:
    torch.manual_seed(0)
    model: Any = where.build()
    if plant.insert is not None:
        model.set_submodule(where.norm, plant.insert(model.get_submodule(where.norm)))
    loop = Loop.of(model, dtype, init_scale=CALIBRATED)
    loop.optimizer.param_groups[0]["lr"] = RATE
    batches = [where.batch() for _ in range(BATCHES)]
    with ExitStack() as fault:
        if folder is not None:
            fault.enter_context(ampscope.watch(model, loop.scaler, dir=folder, quiet=True, heal=True))
        for step in range(LASTING if lasting else ONCE):
            bad = step >= BAD_STEP if lasting else step == BAD_STEP
            if bad and step == BAD_STEP:
                armed = fault.enter_context(ExitStack())
                armed.enter_context(plant.armed(model, where))
                if mended:
                    _mend(model)
            batch = batches[step % BATCHES]
            torch.manual_seed(step)  # a batch with fewer rows draws fewer numbers
            loop.step(plant.spoil(batch) if bad else batch, plant, bad=bad)
            if bad and not lasting:
                armed.close()
        return _judged(model, batches, loop.scaler)


def _mend(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, AfterNorm):
            module.mended = True


def _judged(model: Any, batches: list[Batch], scaler: torch.amp.GradScaler) -> Trained:
    _mend(model)
    model.eval()
    with torch.no_grad(), _wide():
        loss = sum(float(model(**batch).loss) for batch in batches) / BATCHES
    values = [value for value in model.state_dict().values() if value.is_floating_point()]
    is_finite = math.isfinite(loss) and all(bool(value.isfinite().all()) for value in values)
    return Trained(loss, is_finite, scaler.get_scale())


@contextmanager
def _wide() -> Iterator[None]:
    """Float32 wherever the code asks for half precision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "half", torch.Tensor.float)
        yield
