"""Trains a character-level GPT on Python's own source code, in fp16, until its attention overflows.

Nothing is staged. Two things that a good implementation has are left out, as they are in many a first version: the
attention logits are not divided by the square root of the head's width, and the learning rate, generous already,
starts without a warm-up. So the logits grow, faster than the loss falls, and one day a dot product of a query and a
key passes 65,504, the largest number that fp16 can hold.

Run it with ``ampscope demo``, or by itself: ``python -m ampscope.demo.gpt FOLDER``.
"""

from __future__ import annotations

import argparse
import difflib
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampscope
from ampscope.demo.progress import progress

STEPS = 600
CONTEXT = 32
BATCH = 16
LEARNING_RATE = 5e-2
#: Give up after so many steps in a row whose loss is not finite.
PATIENCE = 6


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("future", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-2, -1)
        logits = logits.masked_fill(self.future, -math.inf)
        mixed = F.softmax(logits, dim=-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and beside a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next character of a text."""

    def __init__(self, characters: int, width: int = 64, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(CONTEXT))
        return self.head(self.norm(self.blocks(x)))


def read_text() -> tuple[Tensor, int]:
    """The source of a module of the standard library, as numbers, and how many different characters there are."""
    text = Path(difflib.__file__).read_text(encoding="utf-8")
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    return torch.tensor([number[character] for character in text]), len(characters)


def train(folder: Path, *, heal: bool = False, full: bool = False) -> None:
    """Trains until the loss has not been finite for a while, recording the run into ``folder``.

    Args:
        folder: Where to record the run.
        heal: What a replay proves to help is done to the training, which goes on.
        full: In float32, without autocast and loss scale.
    """
    torch.manual_seed(1)
    text, characters = read_text()
    model = GPT(characters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    scaler = torch.amp.GradScaler("cpu", enabled=not full)

    ampscope.watch(model, scaler, dir=folder, save_tensors=True, audit_every=100, heal=heal)

    bad = 0
    with progress(f"training a small GPT in {'fp32' if full else 'fp16'}", STEPS) as tell:
        for _ in range(STEPS):
            starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1))
            batch = text[starts + torch.arange(CONTEXT + 1)]
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=not full):
                logits = model(batch[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            tell(loss.item(), scaler.get_scale())
            bad = 0 if math.isfinite(loss.item()) else bad + 1
            if bad == PATIENCE:
                break


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description="Train a small GPT in fp16 until it breaks.")
    parser.add_argument("folder", type=Path, help="where to record the run")
    torch.set_num_threads(1)  # the matrices are so small that a second thread only waits
    train(parser.parse_args().folder)


if __name__ == "__main__":
    main()
