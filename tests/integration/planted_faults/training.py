"""One training of a tiny transformer under watch, with or without a plant in one of its steps."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

import ampscope
from ampscope.analysis.results import Diagnosis
from tests.integration.planted_faults.models import Architecture, Batch
from tests.integration.planted_faults.table import BF16, FP16, Plant

#: The step that goes bad in a planted training, and how many steps that has.
BAD_STEP, PLANTED_STEPS = 3, 5
HEALTHY_STEPS = 50
#: A scale at which a planted training has nothing to calibrate; healthy ones start at GradScaler's own.
CALIBRATED = 2.0**8


def train_planted(where: Architecture, dtype: torch.dtype, plant: Plant, folder: Path) -> Diagnosis:
    """Trains with ``plant`` in one step; without a scaler, which would skip it, that step is the last."""
    torch.manual_seed(0)
    model: Any = where.build()
    if plant.insert is not None:
        model.set_submodule(where.norm, plant.insert(model.get_submodule(where.norm)))
    loop = Loop.of(model, dtype, init_scale=CALIBRATED)
    with ampscope.watch(model, loop.scaler, dir=folder, quiet=True, every=plant.every):
        for step in range(PLANTED_STEPS if dtype is FP16 else BAD_STEP + 1):
            bad = step == BAD_STEP
            batch = plant.spoil(where.batch()) if bad else where.batch()
            with plant.armed(model, where) if bad else nullcontext():
                loop.step(batch, plant, bad=bad)
    return ampscope.diagnose(folder)


def train_healthy(where: Architecture, dtype: torch.dtype, folder: Path) -> Diagnosis:
    """Trains as it should be done."""
    torch.manual_seed(0)
    model = where.build()
    loop = Loop.of(model, dtype)
    with ampscope.watch(model, loop.scaler, dir=folder, quiet=True):
        for _ in range(HEALTHY_STEPS):
            loop.step(where.batch())
    return ampscope.diagnose(folder)


@dataclass(slots=True)
class Loop:
    """The AMP recipe with clipping: fp16 with a scaler, bf16 with a disabled one."""

    model: Any
    dtype: torch.dtype
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype, **options: Any) -> Loop:
        scaler = torch.amp.GradScaler("cpu", enabled=dtype is not BF16, **options)
        return cls(model.train(), dtype, torch.optim.AdamW(model.parameters(), lr=1e-3), scaler)

    def step(self, batch: Batch, plant: Plant | None = None, *, bad: bool = False) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=self.dtype):
            outputs = self.model(**batch)
            loss = outputs.loss if plant is None else plant.loss(outputs, batch, bad)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
