"""Trainings through a planted fault: healed, left to it, and as float32 would have gone without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import ampscope
from tests.integration.planted_faults.faults import AfterNorm
from tests.integration.planted_faults.models import Architecture, Batch
from tests.integration.planted_faults.table import (
    BF16,
    FP16,
    Answer,
    Plant,
    row_with_itself,
    without_nan_row,
    zero_in_weight,
)
from tests.integration.planted_faults.training import BAD_STEP, CALIBRATED, Loop

#: Steps of a training with the fault in one of them, and of one in which it stays.
ONCE, LASTING = 12, 40
#: What is learned by heart, so that a training which stands still is far from one that does not.
BATCHES, RATE = 2, 3e-3
#: A loss scale at which gradients leave the range of float16.
TINY = 2.0**-14


def _tiny_scale(loop: Loop, *_: object) -> None:
    loop.scaler.update(new_scale=TINY)


def _in_moment(name: str, value: float) -> Callable[..., None]:
    def write(loop: Loop, model: Any, where: Architecture) -> None:
        loop.optimizer.state[model.get_submodule(where.up).weight][name][0, 0] = value

    return write


def _nowhere(where: Architecture) -> Answer:
    raise NotImplementedError(f"what is upset in the loop of {where} is no fault of a step")


#: What befalls the loop, and not the model or its batch.
OF_LOOPS = (
    Plant(name="loss scale that is too small", dtypes=(FP16,), upset=_tiny_scale, answer=_nowhere),
    Plant(name="poisoned first moment", upset=_in_moment("exp_avg", math.nan), answer=_nowhere),
    Plant(name="poisoned second moment", upset=_in_moment("exp_avg_sq", math.nan), answer=_nowhere),
)


def _from_logits(outputs: Any, batch: Batch, bad: bool) -> torch.Tensor:
    """What the loss of "log of a zero probability" means."""
    logits = outputs.logits.float() * (1e4 if bad else 1.0)
    wanted = batch["labels"].roll(1, -1)
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), wanted.flatten())


#: What is right in the place of a fault that float32 has, too; for faults in modules these say it themselves.
RIGHT: dict[str, dict[str, Any]] = {
    "row without attention": {"spoil": row_with_itself},
    "NaN row in the batch": {"spoil": without_nan_row},
    "log of a zero probability": {"loss": _from_logits},
    "NaN weight": {"armed": zero_in_weight},
    "poisoned buffer": {"armed": lambda *_: nullcontext()},
    "buffer replaced by a poisoned one": {"armed": lambda *_: nullcontext()},
    "bit flip in an activation": {"armed": lambda *_: nullcontext()},
    "poisoned first moment": {"upset": _in_moment("exp_avg", 0.0)},
    "poisoned second moment": {"upset": _in_moment("exp_avg_sq", 0.0)},
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
    """The same in float32, with what is right in the place of the fault; its scaler skips what is not finite."""
    with _wide():
        return by_hand(where, torch.float32, plant, lasting=lasting)


def by_hand(where: Architecture, dtype: torch.dtype, plant: Plant, *, lasting: bool = False) -> Trained:
    """The same with what is right in the place of the fault, which may be one in half precision alone."""
    return _train(where, dtype, replace(plant, **RIGHT.get(plant.name, {})), lasting=lasting, mended=True)


def keeps_scale(plant: Plant, dtype: torch.dtype, scale: float, *, by_hand: float = math.inf) -> bool:
    """Whether a scaler's scale has not collapsed; there is none in bfloat16.

    Args:
        plant: The fault.
        dtype: Of the training.
        scale: At its end.
        by_hand: Likewise with what is right in the place of the fault: large gradients have a small scale.
    """
    least = TINY if plant.name == "loss scale that is too small" else CALIBRATED / 2
    return dtype is BF16 or scale >= min(least, by_hand)


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
                plant.upset(loop, model, where)
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
