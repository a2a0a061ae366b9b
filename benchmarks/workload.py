"""The training that is measured: a transformer on random frames, autocast, GradScaler, clipping and AdamW."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

CLASSES = 100
FRAME = 64  #: features of an input frame


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a model and its batch."""

    width: int
    layers: int
    heads: int
    batch: int
    length: int

    def describe(self) -> dict[str, int]:
        return asdict(self)


SIZES = {
    "tiny": Size(width=64, layers=6, heads=4, batch=2, length=32),
    "small": Size(width=64, layers=3, heads=4, batch=8, length=64),
    "large": Size(width=512, layers=6, heads=8, batch=8, length=128),
}


class Transformer(nn.Module):
    """Frames in, a class for each frame out; layers as in ``nn.TransformerEncoder``, written out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Linear(FRAME, size.width)
        self.position = nn.Parameter(torch.randn(size.length, size.width) * 0.02)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, CLASSES)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.embed(frames) + self.position
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """A pre-norm transformer layer with dropout; a causal one looks back only."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm_2(x)))))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        attended: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return attended


@dataclass(frozen=True, slots=True)
class Place:
    """Where, and in which half precision, the training runs."""

    device: str
    dtype: torch.dtype
    threads: int  #: that torch may use within an op

    def wait(self) -> None:
        """Return when the device has done all it was asked to."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def usual_dtype(device: str) -> torch.dtype:
    """fp16, unless it would run in software: such a step is dozens of times slower and hides every overhead."""
    if device == "cpu" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return torch.bfloat16
    return torch.float16


class Training:
    """A model with its optimizer and scaler, and a batch that it steps on."""

    def __init__(self, size: Size, place: Place) -> None:
        torch.manual_seed(0)
        self.place = place
        device = place.device
        self.model: nn.Module = Transformer(size).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        # Low enough to need no calibration: replays are measured apart, not among the ordinary steps.
        self.scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
        self.frames = torch.randn(size.batch, size.length, FRAME, device=device)
        self.labels = torch.randint(0, CLASSES, (size.batch, size.length), device=device)

    def step(self, frames: Tensor | None = None) -> None:
        """One optimizer step, as a tutorial writes it."""
        self.optimizer.zero_grad()
        with torch.autocast(self.place.device, dtype=self.place.dtype):
            logits = self.model(self.frames if frames is None else frames)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.labels.flatten())
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def poisoned(self) -> Tensor:
        """The same batch with a frame that is finite in fp32 and overflows in half precision, bf16 included."""
        frames = self.frames.clone()
        frames[0, 0] = 3e38
        return frames
