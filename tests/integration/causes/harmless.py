"""The harmless twins of failures: loops whose values are not finite in places where that is right."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope.trace.vocabulary import Cause
from tests.integration.causes.failures import grid, pooled, positions, rows, squared, zero_row
from tests.integration.causes.trained import Loop, Net, smooth_l1

INF = math.inf


def masked_by_count(h: Tensor) -> Tensor:
    there = torch.arange(4096).to(torch.bfloat16) >= 0
    return h * there.float().mean()


def counted_aside(h: Tensor) -> Tensor:
    torch.arange(4096).to(torch.bfloat16).float().mean()
    return h


def samples(h: Tensor) -> Tensor:
    """Measurements in integers, which may be rounded as others are."""
    heard = (2e4 * torch.sin(torch.arange(4096) * 2.3)).to(torch.int16)
    return h + (heard.to(torch.bfloat16).unsqueeze(-1) / 2.0**15 * h.mean()).mean()


def encoded_before(h: Tensor) -> Tensor:
    at = torch.arange(4096).float()
    return h + (torch.sin(at).to(h.dtype).unsqueeze(-1) * h.mean()).mean()


class Harmless(NamedTuple):
    """A loop in which nothing is wrong, and what is said of its oddity."""

    name: str
    loop: Loop
    cause: Cause | None = None


def causal(h: Tensor) -> Tensor:
    ahead = torch.ones(len(h), len(h), dtype=torch.bool).triu(1)
    return (h @ h.t()).masked_fill(ahead, -INF).softmax(-1) @ h


def additive(h: Tensor) -> Tensor:
    keep = torch.ones(len(h), len(h)).tril()
    return (h.float() @ h.float().t() + torch.log(keep)).softmax(-1) @ h.float()


def literal(h: Tensor) -> Tensor:
    drop = torch.ones(len(h), len(h), dtype=h.dtype).triu(1)
    return (h @ h.t() + drop * -1e9).softmax(-1) @ h


def degrees(h: Tensor) -> Tensor:
    scale = h.detach().abs().sum(-1, keepdim=True).float().pow(-0.5)
    return h * scale.masked_fill(scale == INF, 0.0)


def gate(h: Tensor) -> Tensor:
    with torch.no_grad():
        opened = 1 / (1 + torch.exp(h * 1e4))
    return h * opened


def routed(h: Tensor) -> Tensor:
    best = h.topk(2, -1)
    return torch.full_like(h, -INF).scatter(-1, best.indices, best.values).softmax(-1) * h


def metric(out: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        (out[y > 5] - 1).mean()
    return smooth_l1(out, y)


def impossible(out: Tensor, y: Tensor) -> Tensor:
    out = torch.cat([out[:, :2], torch.full_like(out[:, 2:], -INF)], 1)
    return F.cross_entropy(out, torch.zeros(len(y), dtype=torch.long))


def divergence_of_zeros(out: Tensor, _: Tensor) -> Tensor:
    target = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(len(out), 4)
    return F.kl_div(F.log_softmax(out, -1), target, reduction="batchmean")


def safe_root(h: Tensor) -> Tensor:
    h = h.float()
    return torch.where(h != 0, torch.where(h != 0, h.abs(), torch.ones(())).sqrt(), torch.zeros(()))


class Best(nn.Module):
    """Keeps a best value that begins at -inf, and a mask."""

    best: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("best", torch.tensor(-INF))
        self.register_buffer("mask", torch.full((8,), -INF))

    def forward(self, h: Tensor) -> Tensor:
        self.best = torch.maximum(self.best, h.detach().float().max())
        return h


def frozen_adapter(net: Net) -> None:
    nn.init.zeros_(net.head.weight)  # its gradient is not zero, but that of what lies before is, exactly


HARMLESS = [
    Harmless("causal", Loop(part=causal), Cause.BENIGN_INF_MASK),
    Harmless("logarithm of a mask", Loop(part=additive), Cause.BENIGN_INF_MASK),
    Harmless("constant that leaves a key", Loop(part=literal)),
    Harmless("experts", Loop(part=routed), Cause.BENIGN_INF_MASK),
    Harmless("degrees", Loop(part=degrees, odd=zero_row)),
    Harmless("gate", Loop(part=gate)),
    Harmless("norm", Loop(part=lambda h: h * h.float().norm(dim=-1, keepdim=True), odd=zero_row)),
    Harmless("distance", Loop(part=lambda h: torch.cdist(h.float(), h.float()) @ h.float())),
    Harmless("layer norm", Loop(part=lambda h: F.layer_norm(h, (8,)), odd=torch.zeros_like)),
    Harmless("root", Loop(part=safe_root, odd=zero_row)),
    Harmless("base that is bounded", Loop(part=partial(pooled, lowest=1.0), odd=lambda x: x - 50)),
    Harmless("metric", Loop(loss=metric), Cause.BENIGN_METRIC_NAN),
    Harmless("impossible classes", Loop(loss=impossible, outputs=4), Cause.BENIGN_INF_MASK),
    Harmless("divergence", Loop(loss=divergence_of_zeros, outputs=4)),
    Harmless("best so far", Loop(part=Best)),
    Harmless("zero initialised", Loop(prepare=frozen_adapter)),
    Harmless("saturated in float32 too", Loop(part=lambda h: (h + 200).sigmoid())),
    Harmless("far from saturated", Loop(part=lambda h: h.sigmoid())),
    Harmless("dead units", Loop(part=lambda h: (h - 50).relu())),
    Harmless("satisfied hinge", Loop(loss=lambda out, y: (out - 100).relu().mean())),
    Harmless("rounded on purpose", Loop(part=lambda h: h + h.round())),
    Harmless("dropped", Loop(part=lambda h: F.dropout(h, 0.9))),
    Harmless("a small factor and a scale", Loop(loss=lambda out, y: 1e-4 * squared(out, y), scale=65536.0)),
    Harmless("detached", Loop(part=lambda h: h.detach() + 0 * h)),
    Harmless("chosen", Loop(part=lambda h: h * F.one_hot(h.argmax(-1), 8))),
    Harmless("warm-up", Loop(lr=0.0)),
    Harmless("few positions", Loop(part=partial(positions, upto=256), dtype=torch.bfloat16, scale=None)),
    Harmless("rows that float16 can number", Loop(part=partial(rows, apart=50))),
    Harmless("a grid that float16 holds", Loop(part=partial(grid, upto=2048))),
    Harmless("positions that float16 holds", Loop(part=partial(positions, upto=2048))),
    Harmless("a long mask", Loop(part=masked_by_count)),
    Harmless("counted for a metric", Loop(part=counted_aside)),
    Harmless("loud samples", Loop(part=samples)),
    Harmless("encoded before", Loop(part=encoded_before)),
    Harmless(
        "bfloat16 that learns", Loop(prepare=lambda net: net.to(torch.bfloat16), lr=0.1, loss=squared, scale=None)
    ),
    Harmless(
        "calibration",
        Loop(loss=lambda out, y: 50 * squared(out, y), scale=2.0**24, steps=20),
        Cause.BENIGN_INITIAL_CALIBRATION,
    ),
]
