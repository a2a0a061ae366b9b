"""What the user lets go of is not kept alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.training.model_parts import grad_of
from tests.support.training.small_loop import BATCH, WIDTH, here
from tests.support.training.training_loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("device")


def _steps_by_hand(loop: TrainingLoop, x: Tensor) -> None:
    """Weights moved without a torch optimizer: nothing tells that a step is over but its gradients being cleared."""
    loop.model(x).pow(2).mean().backward()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.sub_(0.01 * grad_of(parameter))
            parameter.grad = None


def _full_step(loop: TrainingLoop, x: Tensor) -> None:
    loop.optimizer.zero_grad()
    with torch.autocast(here(), dtype=torch.float16):
        loss = loop.model(x).float().pow(2).mean()
    loop.scaler.scale(loss).backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def _evaluation_without_no_grad(loop: TrainingLoop, x: Tensor) -> None:
    loop.model(x).sum().item()


@pytest.mark.parametrize("work", [_full_step, _steps_by_hand, _evaluation_without_no_grad], ids=lambda f: f.__name__)
def test_no_more_than_the_last_batches_are_kept_alive(work: Callable[..., None], watch: Any) -> None:
    loop = TrainingLoop()
    watch(loop.model, loop.scaler, every=0)
    data = [torch.randn(BATCH, WIDTH) for _ in range(200)]
    batches = [weakref.ref(x) for x in data]
    while data:
        work(loop, data.pop())
    assert sum(batch() is not None for batch in batches) <= 100
