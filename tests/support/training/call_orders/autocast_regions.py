"""Autocast regions and the precision of parameters and recomputation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ampscope.trace.vocabulary import Cause
from tests.support.training.call_orders.registry import wrong
from tests.support.training.small_loop import here
from tests.support.training.usage_bench import (
    STEPS,
    WIDTH,
    Bench,
    Watch,
    loss_of,
)


@wrong(Cause.MISUSE_AUTOCAST_SPANS_STEP)
def one_region_for_all_steps(watch: Watch) -> None:
    bench = Bench(watch)
    with torch.autocast(here(), dtype=torch.float16):
        for _ in range(STEPS):
            bench.optimizer.zero_grad()
            loss = bench.loss()
            with torch.autocast(here(), enabled=False):
                bench.scaler.scale(loss).backward()
            bench.step()


@wrong(Cause.HALF_PARAMS)
def one_layer_in_half(watch: Watch) -> None:
    bench = Bench(lambda *_: None)
    bench.model[2].half()
    watch(bench.model, bench.scaler)
    for _ in bench.steps():
        pass


class Recomputed(torch.autograd.Function):
    """Activation checkpointing that forgets the autocast state."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, gradient.to(y.dtype))
        return None, x.grad


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Recomputed.apply(self.block, x.requires_grad_()))


@wrong(Cause.MISUSE_CHECKPOINT_AUTOCAST_MISMATCH)
def recomputed_in_another_precision(watch: Watch) -> None:
    model = Checkpointed()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler(here(), init_scale=256.0)
    watch(model, scaler)
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
