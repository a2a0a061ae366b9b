"""The trainings that are asked about: small models, an ordinary loop, steps that go wrong on demand."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampscope
from ampscope.capture.scope import Scope

FRAME, WIDTH, HEADS, LENGTH, BATCH, CLASSES = 16, 64, 4, 32, 8, 10
#: Finite in float32, beyond every half precision.
TOO_LARGE = 3e38
#: A factor under which ordinary activations, or their gradients, leave float16.
STEEP = 1e6


class Gain(nn.Module):
    """Divides by one factor and multiplies with another: what overflows can be had in forward, or in backward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.over, self.times = 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        smaller = x / self.over
        return smaller * self.times


class Block(nn.Module):
    """A pre-norm transformer layer with dropout, in attention too, and a gain within its second half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gain = Gain()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(nn.functional.gelu(self.gain(self.up(self.norm_2(x))))))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        share = 0.1 if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=share)
        attended: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return attended


class Transformer(nn.Module):
    """Frames in, a class for each out.

    Args:
        reentrant: With which kind of activation checkpointing; None for none.
    """

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed, self.head = nn.Linear(FRAME, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, frames: Tensor) -> Tensor:
        x = self.embed(frames)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(x)
        return logits


class Convolutions(nn.Module):
    """A small image net over the frames, channels last, with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before in (1, 16, 32):
            after = max(16, 2 * before)
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(64 * FRAME, CLASSES)

    def forward(self, frames: Tensor) -> Tensor:
        images = frames.unsqueeze(1).to(memory_format=torch.channels_last)
        logits: Tensor = self.head(self.layers(images).transpose(1, 2).flatten(2))
        return logits


class Recurrent(nn.Module):
    """Two layers of an LSTM, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FRAME, WIDTH, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, frames: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(frames)[0])
        return logits


class Loop:
    """A training, as a tutorial writes it: autocast to float16, a scaler, AdamW with a falling learning rate.

    Args:
        device: Where it runs.
        build: Makes the model.
        fused: Whether the optimizer decides on the device.
        scale: The first loss scale.
        scaled: Whether there is a scaler at all.
    """

    def __init__(
        self,
        device: torch.device,
        build: Callable[[], nn.Module] = Transformer,
        *,
        fused: bool = False,
        scale: float = 2.0**10,
        scaled: bool = True,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.rates: list[float] = []  #: the learning rate of each step
        self.model = build().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.rate, fused=fused)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=scale, enabled=scaled)
        self.frames = torch.randn(BATCH, LENGTH, FRAME).to(device)
        self.labels = torch.randint(0, CLASSES, (BATCH, LENGTH)).to(device)

    def step(self, frames: Tensor | None = None) -> Tensor:
        """One optimizer step; returns its loss."""
        loss = self.forward_backward(frames)
        self.finish()
        return loss

    def forward_backward(self, frames: Tensor | None = None) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, dtype=torch.float16):
            loss = self.loss(self.model(self.frames if frames is None else frames))
        self.scaler.scale(loss).backward()
        return loss.detach()

    def loss(self, logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), self.labels.flatten())

    def finish(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.rates.append(self.rate)
        self.optimizer.param_groups[0]["lr"] = self.rate

    @property
    def rate(self) -> float:
        """The learning rate of the next step; each has its own."""
        return 1e-3 / (1 + len(self.rates))

    def bad_frames(self) -> Tensor:
        """The batch with one number that is finite in float32 and no half precision holds."""
        frames = self.frames.clone()
        frames[0, 0, 0] = TOO_LARGE
        return frames

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()


def watch(loop: Loop, **options: Any) -> Scope:
    """Watches a loop into a folder of its own, which goes when the check that asks ends."""
    return ampscope.watch(loop.model, loop.scaler, dir=Path(tempfile.mkdtemp()) / "run", quiet=True, **options)
