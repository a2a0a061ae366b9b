"""Trainings put together by chance, none of which watching changes by a bit, in whichever mode.

A number decides on the layers, the precision, the optimizer, the loop's habits, what goes wrong and how it is watched.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.training.twin_runs import Watched, train_both

WIDTH, LENGTH, BATCH, STEPS = 8, 6, 4, 12
QUICK, CHECKED, ALL = 8, 24, 60
GAIN = 2.0**24
Choices = random.Random


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Recomputed(Residual):
    """Runs its inner layer again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return inner


class Attention(nn.Module):
    """Masked attention with its scores written out, or by torch's function."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = (q @ k.transpose(-2, -1)).masked_fill(~self.mask, -torch.inf)
        return scores.softmax(-1) @ v


class OverFeatures(nn.Module):
    """A layer that wants features before time: a convolution, a normalisation by the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return inner


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.inner(x)[0]
        return states


class Counting(nn.Module):
    """Keeps a number, a list and a running mean of its own, and writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[float] = []
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x.clone()
        x[:, 0] *= 0.5
        with torch.no_grad():
            self.mean.lerp_(x.float().mean((0, 1)), 0.1)
        self.seen.append(float(self.mean[0]))
        return x - self.mean


class InFloat32(nn.Module):
    """A part that the user keeps out of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            inner: Tensor = self.inner(x.float()).exp().log1p()
        return inner


LAYERS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.RMSNorm(WIDTH),
    lambda: OverFeatures(nn.BatchNorm1d(WIDTH)),
    lambda: OverFeatures(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    lambda: nn.Dropout(0.2),
    nn.GELU,
    nn.ReLU,
    nn.SiLU,
    nn.Tanh,
    lambda: Attention(fused=False),
    lambda: Attention(fused=True),
    lambda: Residual(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())),
    lambda: Recomputed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))),
    Recurrent,
    Counting,
    InFloat32,
)
OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda weights: torch.optim.SGD(weights, 0.01, momentum=0.9),
    lambda weights: torch.optim.AdamW(weights, 1e-3),
    lambda weights: torch.optim.AdamW(weights, 1e-3, fused=True),
    lambda weights: torch.optim.Adam(weights, 1e-3, foreach=True),
    lambda weights: torch.optim.RMSprop(weights, 1e-3),
    lambda weights: torch.optim.NAdam(weights, 1e-3),
)
WATCHED: tuple[dict[str, Any], ...] = (
    {},
    {"every": 0},
    {"every": 1},
    {"every": 3, "overhead": 1.0, "replay_budget": 3},
    {"overhead": 1.0, "replay_budget": 3},
    {"save_tensors": True},
    {"audit_every": 2},
)


class Network(nn.Module):
    """Words in, a class for each out; the words' weights may be the last layer's, too."""

    def __init__(self, chance: Choices) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH)
        self.layers = nn.Sequential(*(chance.choice(LAYERS)() for _ in range(chance.randint(3, 7))))
        self.head = nn.Linear(WIDTH, 16)
        if chance.random() < 0.3:
            self.head.weight = self.words.weight
        if chance.random() < 0.2:
            self.words.requires_grad_(requires_grad=False)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.words(words)))
        return logits


def training(number: int) -> tuple[Callable[[Callable[..., Any]], Any], dict[str, Any]]:
    """A loop, and the options with which it is watched."""
    options = WATCHED[number % len(WATCHED)]

    def loop(watch: Callable[..., Any]) -> Any:
        chance = Choices(number)
        model = Network(chance)
        weights = [each for each in model.parameters() if each.requires_grad]
        optimizer = chance.choice(OPTIMIZERS)(weights)
        dtype = chance.choice([torch.float16, torch.float16, torch.bfloat16, None])
        has_scaler = dtype is torch.float16 or (dtype is not None and chance.random() < 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4) if has_scaler else None
        clips, parts, bad = chance.random() < 0.5, chance.choice([1, 1, 2]), chance.sample(range(2, STEPS), 2)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, 5) if chance.random() < 0.3 else None
        spoils = chance.choice([lambda loss: loss * GAIN, lambda loss: loss * torch.inf, lambda loss: loss])
        watch(model, scaler)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=chance.random() < 0.8)
            for _ in range(parts):
                words = torch.randint(16, (BATCH, LENGTH))
                with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
                    loss = F.cross_entropy(model(words).flatten(0, 1), words.flatten()) / parts
                losses.append(loss.detach())
                loss = spoils(loss) if step in bad and scaler is not None else loss
                (loss if scaler is None else scaler.scale(loss)).backward()
            _step(optimizer, scaler, weights, clips=clips)
            if decay is not None:
                decay.step()
        return [model, optimizer, scaler, losses, chance.random()]

    return loop, options


def _step(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, weights: Sequence[Tensor], *, clips: bool
) -> None:
    if clips:
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, 1.0)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # RMSNorm under autocast
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(each, marks=() if each < QUICK else pytest.mark.slow if each < CHECKED else pytest.mark.soak)
        for each in range(ALL)
    ],
)
def test_watching_changes_no_bit(number: int, run_folder: Path) -> None:
    loop, options = training(number)
    watched: Watched = train_both(loop, run_folder, **options)
    assert len(watched.steps) == STEPS
    assert watched.warnings == []
