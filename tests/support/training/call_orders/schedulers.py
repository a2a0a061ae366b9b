"""Learning rate schedulers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler

from ampscope.trace.vocabulary import Cause
from tests.support.training.call_orders.registry import RIGHT, WRONG, right
from tests.support.training.usage_bench import (
    OVERFLOW,
    STEPS,
    Bench,
    Watch,
)

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10),
    "a plateau": lambda optimizer: lr_scheduler.StepLR(optimizer, 100),
    "a sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
        [4],
    ),
}


def scheduled(watch: Watch, make: Callable[[torch.optim.Optimizer], Any], *, guarded: bool) -> Any:
    bench = Bench(watch)
    schedule = make(bench.optimizer)
    for number in range(2 * STEPS):
        bench.scaled(OVERFLOW if number in (2, 5) else 1.0)
        before = bench.scaler.get_scale()
        bench.step()
        if not guarded or bench.scaler.get_scale() >= before:
            schedule.step()
    return bench.state


for name, make in SCHEDULERS.items():
    RIGHT[f"{name}, waiting"] = partial(scheduled, make=make, guarded=True)
    WRONG[f"{name}, running on"] = partial(scheduled, make=make, guarded=False), Cause.MISUSE_SCHEDULER_ORDER, 2


@right
def a_schedule_of_epochs(watch: Watch) -> Any:
    bench = Bench(watch)
    schedule = lr_scheduler.StepLR(bench.optimizer, 1, 0.5)
    for _ in range(2):
        for number in range(STEPS):
            bench.scaled(OVERFLOW if number == STEPS - 1 else 1.0)
            bench.step()
        schedule.step()
    return bench.state
