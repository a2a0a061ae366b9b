"""Failures of numbers, one a row: how the loop is written, and what is to be said about it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope.trace.vocabulary import Cause
from tests.integration.causes.trained import ODD, Loop, Net

INF = math.inf
_CAST = "aten._to_copy.default"
_ALONE: dict[str, Any] = {"scale": None, "steps": 6}


class Failure(NamedTuple):
    """A loop and the answer."""

    name: str
    loop: Loop
    cause: Cause
    op: str
    module: str = "part"
    phase: str = "forward"
    step: int = ODD
    says: str = ""  #: a part of the explanation


def zero_row(x: Tensor) -> Tensor:
    return x.index_fill(0, torch.tensor([1]), 0.0)


def nan_row(x: Tensor) -> Tensor:
    return x.index_fill(0, torch.tensor([1, 3]), math.nan)


def rms_norm(h: Tensor) -> Tensor:
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-8)


def zeros_masked_by_hand(h: Tensor) -> Tensor:
    h = h.float().masked_fill(h == 0, -INF)
    raised = torch.exp(h - h.amax(-1, keepdim=True))
    return raised / raised.sum(-1, keepdim=True)


class Centred(nn.Module):
    """Keeps a moving average that it does not use before the last steps."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.square().mean(0).float(), alpha=0.1)
        return h - self.mean if self.calls > ODD + 2 else h


def squared(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out.float(), y)


def pooled(h: Tensor, *, lowest: float = -math.inf) -> Tensor:
    """Takes a generalised mean, whose exponent is a tensor, as one that is learnt."""
    return h * (h.float() + 10).clamp(lowest, 30.0).pow(torch.tensor(1.5)).mean(-1, keepdim=True) / 100


def positions(h: Tensor, *, upto: int = 2048) -> Tensor:
    """Adds an encoding of positions that are counted in the dtype of ``h``."""
    counted = torch.arange(upto).to(h.dtype)
    return h + torch.sin(counted.unsqueeze(-1) * h.mean()).mean()


def grid(h: Tensor, *, upto: int = 6000) -> Tensor:
    """Adds an encoding of positions that are made in float16."""
    counted = torch.arange(upto, dtype=torch.float16)
    return h + torch.sin(counted.unsqueeze(-1) * h.mean()).mean()


def timestamps(h: Tensor) -> Tensor:
    at = torch.tensor([1_700_000_000 + 977 * (7 * n % 40) for n in range(40)]).to(torch.bfloat16)
    return h * (1 + 1e-12 * (at - at[0] + 1.0).mean())


def same_number(h: Tensor) -> Tensor:
    """Samples of one number belong together; the numbers are told apart in bfloat16."""
    numbers = torch.tensor([20_000 + 45 * (7 * n % 40) for n in range(40)]).to(torch.bfloat16)
    return h * (numbers[:, None] == numbers[None]).float().mean()


def rows(h: Tensor, apart: int = 1001) -> Tensor:
    """Rows of a table are picked by numbers that went through float16, each of which stays a number of its own."""
    numbers = torch.tensor([1 + apart * (7 * n % 40) for n in range(40)])
    table = torch.linspace(0, 1, 40 * 1001 + 64).unsqueeze(-1)
    return h + F.embedding(numbers.half().long(), table).mean() * h.mean()


def clock(h: Tensor) -> Tensor:
    ticks = torch.linspace(0, 1, 4096).to(torch.bfloat16)
    return h + (ticks.unsqueeze(-1) * h.mean()).mean()


FAILURES = [
    # range
    Failure("exp", Loop(part=torch.exp, odd=lambda x: x * 50), Cause.FP16_OVERFLOW, "aten.exp.default"),
    Failure(
        "swallowed",
        Loop(part=rms_norm, odd=lambda x: x * 2000),
        Cause.FP16_OVERFLOW,
        "aten.pow.Tensor_Scalar",
    ),
    Failure(
        "flushed divisor",
        Loop(part=lambda h: h / torch.exp(h), odd=lambda x: x - 20),
        Cause.FP16_UNDERFLOW,
        "aten.div.Tensor",
        says="exp",
    ),
    Failure(
        "flushed product",
        Loop(part=lambda h: h / (1e-3 + 0 * h).cumprod(-1)[:, -1:]),
        Cause.FP16_UNDERFLOW,
        "aten.div.Tensor",
        step=0,
        says="cumprod",
    ),
    Failure(
        "gradient partly too small",
        Loop(part=nn.GELU, loss=lambda out, y: 2e-7 * squared(out, y), scale=1.0),
        Cause.FP16_UNDERFLOW,
        "aten.mm.default",
        module="head",
        phase="backward",
        step=0,
        says="which float32 keeps",
    ),
    Failure(
        "saturated in bfloat16",
        Loop(part=lambda h: (h + 6).tanh(), dtype=torch.bfloat16, scale=None),
        Cause.STAGNATION,
        "aten.tanh.default",
        step=0,
        says="bfloat16",
    ),
    Failure(
        "one minus almost one",
        Loop(part=lambda h: 1 - torch.exp(-(h.float() * 1e-2 + 10)).neg().add(1).half()),
        Cause.STAGNATION,
        "aten.rsub.Scalar",
        step=0,
    ),
    Failure(
        "eps of Adam",
        Loop(prepare=Net.half, optimizer=torch.optim.Adam, loss=lambda out, y: 1e-4 * squared(out, y), **_ALONE),
        Cause.EPS_UNDERFLOW,
        "aten.addcdiv_.default",
        module="",
        phase="optimizer",
        step=0,
        says="1e-8",
    ),
    Failure("a long text", Loop(part=partial(positions, upto=30_000)), Cause.INFORMATION_LOST, _CAST, step=0),
    Failure(
        "a long grid",
        Loop(part=grid),
        Cause.INFORMATION_LOST,
        "aten.arange.default",
        step=0,
        says="6,000 values of a grid become ",
    ),
    Failure("time stamps", Loop(part=timestamps), Cause.INFORMATION_LOST, _CAST, step=0, says="40 different values"),
    Failure("numbers compared", Loop(part=same_number), Cause.INFORMATION_LOST, _CAST, step=0),
    Failure("picked rows", Loop(part=rows), Cause.INFORMATION_LOST, _CAST, step=0, says=" of 40 numbers of int64 are "),
    Failure("a fine clock", Loop(part=clock), Cause.INFORMATION_LOST, _CAST, step=0, says="float32 become"),
    # mathematics
    Failure(
        "empty mean",
        Loop(loss=lambda out, y: (out[y > 0] - 1).square().mean(), odd_target=torch.zeros_like),
        Cause.DIV_ZERO,
        "aten.mean.default",
        module="",
    ),
    Failure(
        "negative base",
        Loop(part=pooled, odd=lambda x: x - 50),
        Cause.SQRT_NEGATIVE,
        "aten.pow.Tensor_Tensor",
        says="a negative number (-",
    ),
    Failure(
        "arc cosine at one",
        Loop(part=lambda h: h.float().cos().acos(), odd=zero_row),
        Cause.DIV_ZERO,
        "aten.rsqrt.default",
        phase="backward",
        says="The slope of acos is infinite at 1",
    ),
    Failure(
        "masked row by hand",
        Loop(part=zeros_masked_by_hand, odd=zero_row),
        Cause.ALL_MASKED_SOFTMAX,
        "aten.sub.Tensor",
    ),
    # from outside
    Failure("target", Loop(odd_target=nan_row), Cause.BAD_INPUT, "input", module="", says="index 1, 3"),
    Failure(
        "buffer poisoned early",
        Loop(part=Centred, odd=lambda x: x * 900, steps=8),
        Cause.FP16_OVERFLOW,
        "aten.pow.Tensor_Scalar",
    ),
]
