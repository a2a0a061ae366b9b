"""Micro-batches, ``unscale_`` and ``update``."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from ampscope.trace.vocabulary import Cause
from tests.support.training.call_orders.registry import right, wrong
from tests.support.training.usage_bench import (
    OVERFLOW,
    STEPS,
    Bench,
    Watch,
)


@wrong(Cause.MISUSE_UPDATE_EACH_MICROBATCH)
def a_backward_after_unscale(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in bench.steps():
        bench.scaler.unscale_(bench.optimizer)
        bench.scaler.scale(bench.loss()).backward()


@wrong(Cause.MISUSE_UPDATE_EACH_MICROBATCH)
def unscale_after_each_backward(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in bench.steps():
        bench.scaler.unscale_(bench.optimizer)
        bench.scaler.scale(bench.loss()).backward()
        bench.scaler.unscale_(bench.optimizer)


@wrong(Cause.MISUSE_UPDATE_EACH_MICROBATCH)
def update_after_each_backward(watch: Watch) -> None:
    bench = Bench(watch)
    bench.scaled()
    bench.scaler.update()


@wrong(Cause.MISUSE_GRADIENTS_CLEARED)
def cleared_before_the_step(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in bench.steps():
        bench.optimizer.zero_grad()


@wrong(Cause.MISUSE_GRADIENTS_CLEARED, step=2)
def set_to_zero_before_the_step(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in bench.steps():
        bench.optimizer.zero_grad(set_to_none=False)


@right
def a_bad_batch_set_to_zero(watch: Watch) -> None:
    bench = Bench(watch)
    for number, _ in enumerate(bench.steps()):
        if number % 3:
            bench.optimizer.zero_grad(set_to_none=False)


@right
def bad_batches_in_a_row_set_to_zero(watch: Watch) -> None:
    bench = Bench(watch)
    for number, _ in enumerate(bench.steps(12)):
        if number > 7:
            bench.optimizer.zero_grad(set_to_none=False)


@wrong(Cause.MISUSE_GRADIENTS_CLEARED, step=5)
def set_to_zero_more_often_than_not(watch: Watch) -> None:
    bench = Bench(watch)
    for number, _ in enumerate(bench.steps(6)):
        if number > 2:
            bench.optimizer.zero_grad(set_to_none=False)


@right
def gradients_put_together_by_hand(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in bench.steps():
        for gradient in bench.gradients:
            part = gradient.clone()
            gradient.zero_()
            gradient.copy_(part)


@wrong(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE)
def unscale_twice(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in bench.steps():
        bench.scaler.unscale_(bench.optimizer)
        bench.scaler.unscale_(bench.optimizer)


@wrong(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE)
def update_twice(watch: Watch) -> None:
    bench = Bench(watch)
    bench.scaled()
    bench.step()
    bench.scaler.update()


@wrong(Cause.MISUSE_MULTIPLE_SCALERS_UPDATE, 1)
def update_forgotten(watch: Watch) -> None:
    bench = Bench(watch)
    for _ in range(STEPS):
        bench.scaled()
        bench.scaler.step(bench.optimizer)


@right
def accumulation_with_the_step_left_out_once(watch: Watch) -> Any:
    bench = Bench(watch)
    for number in range(2 * STEPS):
        bench.scaler.scale(bench.loss() / 2).backward()
        if number % 2:
            bench.scaler.unscale_(bench.optimizer)
            norm = nn.utils.clip_grad_norm_(bench.parameters, 1.0)
            if number != 3 and math.isfinite(norm):
                bench.scaler.step(bench.optimizer)
            bench.scaler.update()
            bench.optimizer.zero_grad(set_to_none=number > 3)
    return bench.state


@right
def clipping_on_a_step_that_is_skipped(watch: Watch) -> Any:
    bench = Bench(watch)
    for number in range(2 * STEPS):
        bench.scaled(OVERFLOW if number == 0 else 1.0)
        bench.scaler.unscale_(bench.optimizer)
        nn.utils.clip_grad_norm_(bench.parameters, 1.0)
        bench.step()
    return bench.state
