"""GPT-2 and ResNet-50 in plain torch, with their losses inside; their sizes are the published ones.

Radford et al., Language Models are Unsupervised Multitask Learners, 2019; He et al., Deep Residual Learning, 2015.
Each takes ``trip``, a factor on the features before the head: a large one makes that step overflow in half precision.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from workload import Block


class GPT2(nn.Module):
    """124 million parameters: 12 layers of width 768, the head tied to the embedding."""

    WORDS: ClassVar[int] = 50257
    FEW_WORDS: ClassVar[int] = 256  #: of the tiny one
    LENGTH: ClassVar[int] = 1024

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12, words: int = WORDS) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(self.LENGTH, width)
        self.layers = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    @classmethod
    def tiny(cls) -> Self:
        return cls(32, 2, 2, cls.FEW_WORDS)

    def forward(self, tokens: Tensor, *, trip: float = 1.0) -> Tensor:
        """The mean loss of the next tokens; tokens int64 (batch, length)."""
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = nn.functional.linear(self.norm(x) * trip, self.words.weight)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class _Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.narrow, self.conv = nn.Conv2d(before, width, 1, bias=False), _three(width, stride)
        self.wide = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for channels in (width, width, 4 * width))
        self.past = nn.Sequential()
        if stride != 1 or before != 4 * width:
            self.past = nn.Sequential(
                nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.relu(self.norms[0](self.narrow(x)))
        inner = nn.functional.relu(self.norms[1](self.conv(inner)))
        return nn.functional.relu(self.past(x) + self.norms[2](self.wide(inner)))


def _three(width: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(width, width, 3, stride, padding=1, bias=False)


class ResNet(nn.Module):
    """ResNet-50; small pictures make its steps as long as its launches take."""

    CLASSES: ClassVar[int] = 1000

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                inner = width * 2**stage
                blocks.append(_Bottleneck(channels, inner, 2 if stage and not number else 1))
                channels = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, self.CLASSES)

    @classmethod
    def tiny(cls) -> Self:
        return cls((1, 1), 8)

    def forward(self, pictures: Tensor, classes: Tensor, *, trip: float = 1.0) -> Tensor:
        """The mean loss; pictures float32 (batch, 3, height, width), classes int64 (batch,)."""
        x = nn.functional.max_pool2d(nn.functional.relu(self.norm(self.stem(pictures))), 3, 2, padding=1)
        features = self.blocks(x).mean((2, 3)) * trip
        return nn.functional.cross_entropy(self.head(features), classes)
