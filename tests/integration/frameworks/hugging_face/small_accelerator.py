"""A small network trained by an ``Accelerator``, and one step that goes bad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.support.training.twin_runs import exact_state, seed_everything

ROWS, WIDTH, CLASSES, BATCH, ACCUMULATE = 64, 8, 4, 4, 2
STEPS = ROWS // BATCH // ACCUMULATE
#: The step, counted from 0, whose second micro-batch holds a value that is too large.
BAD_STEP = 3


class Network(nn.Module):
    """With everything a replay has to put back: dropout, running statistics, a call of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.1), nn.GELU())
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layers(x)
        return self.head(self.norm(hidden))


def make_accelerator(precision: str, **options: Any) -> Accelerator:
    """In bf16, or in fp16 with a scaler put where accelerate keeps it: on a CPU it makes none."""
    chosen = {"cpu": True, "gradient_accumulation_steps": ACCUMULATE, **options}
    accelerator = Accelerator(mixed_precision=precision, **chosen)
    if precision == "fp16":
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        accelerator.native_amp = True
    return accelerator


def forget_accelerate() -> None:
    """Lets the next accelerator choose its own precision and compiler; all of a process share one state."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def square_in_half(output: Tensor) -> Tensor:
    """Part of a loss: too large for fp16 from 256 on."""
    return output.half().square().float().mean() if output.abs().max() > 1000 else output.square().mean()


def train(
    accelerator: Accelerator,
    watch: Callable[[Accelerator], object] = lambda _: None,
    *,
    bad: bool = False,
    end: bool = False,
    clip: Callable[[Accelerator, Any, Any], object] = lambda accelerator, network, _: accelerator.clip_grad_norm_(
        network.parameters(), 1.0
    ),
) -> dict[str, bytes]:
    """Trains for one epoch; every bit of what is left, and of the losses on the way.

    Args:
        accelerator: What trains.
        watch: Called after ``prepare``.
        bad: Whether one batch goes bad.
        clip: Given the accelerator, the network and its optimizer before each step.
        end: Whether ``end_training`` is called, as those do who use trackers.
    """
    seed_everything()
    data = TensorDataset(torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,)))
    network: Any = Network()
    optimizer: Any = torch.optim.AdamW(network.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    loader: Any = DataLoader(data, BATCH)
    network, optimizer, loader, scheduler = accelerator.prepare(network, optimizer, loader, scheduler)
    watch(accelerator)
    losses = []
    for number, (x, y) in enumerate(loader):
        with accelerator.accumulate(network):
            output = network(x)
            if bad and number == BAD_STEP * ACCUMULATE + 1:
                output = output * 2.0**20
            loss = F.cross_entropy(output, y) + 1e-3 * square_in_half(output)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                clip(accelerator, network, optimizer)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.log({"loss": losses[-1]}, step=number)
    if end:
        accelerator.end_training()
    plain = accelerator.unwrap_model(network, keep_fp32_wrapper=False)
    return exact_state([plain.state_dict(), optimizer, accelerator.scaler, losses])
