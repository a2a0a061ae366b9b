"""Small trainings that differ in one thing: what a commit, a colleague or another machine may have changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ampscope

WIDTH, TOKENS, LENGTH, BATCH = 16, 11, 6, 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training; each field is what one planted change is about."""

    attribute: str = "blocks"
    inserted: bool = False
    final_norm: bool = True
    norm_eps: float = 1e-5
    float_logits: bool = True
    float_gate: bool = False
    activation: str = "gelu"
    transposed: bool = False
    dropout: float = 0.1
    residual: bool = True
    mask: float = -1e4
    swapped: bool = False
    divided_by: float = 4.0
    without_autocast: bool = False
    smoothing: float = 0.0
    seed: int = 0
    draw_seed: int = 5
    batch_seed: int = 3
    flipped: bool = False
    half_embedding: bool = False
    scale: float = 1024.0
    lr: float = 1e-2
    optimizer: str = "adamw"
    optimizer_eps: float = 1e-8
    weight_decay: float = 0.01
    steps: int = 3
    micro_batches: int = 1
    checkpointed: bool = False
    autocast: torch.dtype | None = torch.bfloat16


class Attention(nn.Module):
    """One head, written out, so that its ops are the model's own."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).triu(1).bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        if self.plan.swapped:
            key, value = value, key
        if self.plan.transposed:
            logits = (key @ query.transpose(-2, -1)).transpose(-2, -1)
        else:
            logits = query @ key.transpose(-2, -1)
        logits = logits / self.plan.divided_by
        if self.plan.float_logits:
            logits = logits.float()
        logits = logits.masked_fill(self.mask, self.plan.mask)
        weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
        return self.out(weights.to(value.dtype) @ value)


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, plan: Plan, number: int) -> None:
        super().__init__()
        self.plan, self.number = plan, number
        self.norm = nn.LayerNorm(WIDTH, eps=plan.norm_eps)
        self.attention = Attention(plan)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.GELU() if plan.activation == "gelu" or number else nn.ReLU()
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(plan.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        if self.plan.without_autocast and self.number == 1:
            with torch.autocast("cpu", enabled=False):
                fed = self.feed(x.float())
        else:
            fed = self.feed(x)
        return x + fed if self.plan.residual or self.number != 1 else fed

    def feed(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x))
        if self.plan.float_gate and self.number == 1:
            return self.drop(self.down((hidden.float() * 1.5).to(hidden.dtype)))
        return self.drop(self.down(hidden * 1.5))


class Model(nn.Module):
    """A language model of three blocks."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        blocks = [Block(plan, number) for number in range(3)]
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        if plan.inserted:
            blocks.insert(1, Block(plan, 3))
        setattr(self, plan.attribute, nn.ModuleList(blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in getattr(self, self.plan.attribute):
            x = checkpoint(block, x, use_reentrant=False) if self.plan.checkpointed else block(x)
        return self.head(self.norm(x) if self.plan.final_norm else x)


def train(folder: Path, plan: Plan) -> Path:
    """Train by a plan, every step traced; returns the run's folder."""
    torch.manual_seed(plan.seed)
    model = Model(plan)
    if plan.flipped:
        with torch.no_grad():
            weight = getattr(model, plan.attribute)[1].up.weight
            weight.view(torch.int32)[3, 5] ^= 1 << 21
    if plan.half_embedding:
        model.embedding.to(torch.bfloat16)
    optimizer = _optimizer(model, plan)
    scaler = torch.amp.GradScaler("cpu", init_scale=plan.scale)
    torch.manual_seed(plan.draw_seed + plan.seed)
    drawn = torch.Generator().manual_seed(plan.batch_seed)
    with ampscope.watch(model, scaler, dir=folder, every=1, overhead=1.0):
        for _ in range(plan.steps):
            optimizer.zero_grad()
            for _ in range(plan.micro_batches):
                scaler.scale(_loss(model, plan, drawn)).backward()
            scaler.step(optimizer)
            scaler.update()
    return folder


def _loss(model: nn.Module, plan: Plan, drawn: torch.Generator) -> Tensor:
    batch = torch.randint(TOKENS, (BATCH, LENGTH + 1), generator=drawn)
    with torch.autocast("cpu", plan.autocast or torch.bfloat16, enabled=plan.autocast is not None):
        logits = model(batch[:, :-1])
        targets = batch[:, 1:].flatten()
        return functional.cross_entropy(logits.flatten(0, 1), targets, label_smoothing=plan.smoothing)


def _optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    if plan.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=plan.lr)
    return torch.optim.AdamW(model.parameters(), lr=plan.lr, eps=plan.optimizer_eps, weight_decay=plan.weight_decay)
