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


def attention(h: Tensor) -> Tensor:
    return (h @ h.t()).softmax(-1) @ h


def rms_norm(h: Tensor) -> Tensor:
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-8)


def zeros_masked_by_constant(h: Tensor) -> Tensor:
    return (h + (1.0 - (h.abs() > 0).to(h.dtype)) * -1e9).softmax(-1)


def zeros_masked(h: Tensor) -> Tensor:
    return h.masked_fill(h == 0, -INF).softmax(-1)


def zeros_masked_by_hand(h: Tensor) -> Tensor:
    h = h.float().masked_fill(h == 0, -INF)
    raised = torch.exp(h - h.amax(-1, keepdim=True))
    return raised / raised.sum(-1, keepdim=True)


def log_where_positive(h: Tensor) -> Tensor:
    return torch.where(h != 0, torch.log(h.abs().float()), torch.zeros(()))


def entropy(out: Tensor, _: Tensor) -> Tensor:
    p = out.softmax(-1)
    return -(p * torch.log(p)).sum(-1).mean()


def ctc(out: Tensor, y: Tensor) -> Tensor:
    lines = F.log_softmax(out.float(), -1).reshape(-1, 1, 4)
    length = int(y.sum())  # 4 in every step but the odd one
    return F.ctc_loss(lines, torch.ones(1, length, dtype=torch.long), torch.tensor([8]), torch.tensor([length]))


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


class Struck(nn.Module):
    """Has one value of its result overwritten once, behind torch's back."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        out = self.lin(h)
        if self.calls == ODD + 1:
            out.detach().view(torch.int16).numpy()[0, 0] = 0x7E00
        return out


def settled(net: Net) -> Net:
    """Weights of ordinary size: next to zero, any update is large enough."""
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    return net


def poisoned_weight(net: Net) -> None:
    net.head.weight.data[0, 0] = math.nan


class Offset(nn.Module):
    """Subtracts a buffer that came bad from a checkpoint."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((8,), math.nan))

    def forward(self, h: Tensor) -> Tensor:
        return h - self.mean


def squared(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out.float(), y)


def positions(h: Tensor, *, upto: int = 2048) -> Tensor:
    """Adds an encoding of positions that are counted in the dtype of ``h``."""
    counted = torch.arange(upto).to(h.dtype)
    return h + torch.sin(counted.unsqueeze(-1) * h.mean()).mean()


def timestamps(h: Tensor) -> Tensor:
    at = torch.tensor([1_700_000_000 + 977 * (7 * n % 40) for n in range(40)]).to(torch.bfloat16)
    return h * (1 + 1e-12 * (at - at[0] + 1.0).mean())


def same_number(h: Tensor) -> Tensor:
    """Samples of one number belong together; the numbers are told apart in bfloat16."""
    numbers = torch.tensor([20_000 + 45 * (7 * n % 40) for n in range(40)]).to(torch.bfloat16)
    return h * (numbers[:, None] == numbers[None]).float().mean()


def clock(h: Tensor) -> Tensor:
    ticks = torch.linspace(0, 1, 4096).to(torch.bfloat16)
    return h + (ticks.unsqueeze(-1) * h.mean()).mean()


FAILURES = [
    # range
    Failure("logits", Loop(part=attention, odd=lambda x: x * 3000), Cause.FP16_OVERFLOW, "aten.mm.default"),
    Failure("exp", Loop(part=torch.exp, odd=lambda x: x * 50), Cause.FP16_OVERFLOW, "aten.exp.default"),
    Failure(
        "swallowed",
        Loop(part=rms_norm, odd=lambda x: x * 2000),
        Cause.FP16_OVERFLOW,
        "aten.pow.Tensor_Scalar",
    ),
    Failure("eps", Loop(part=rms_norm, odd=zero_row), Cause.EPS_UNDERFLOW, "aten.rsqrt.default", says="1e-8"),
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
    Failure("literal", Loop(part=zeros_masked_by_constant, odd=zero_row), Cause.LITERAL_OVERFLOW, "aten.mul.Tensor"),
    Failure(
        "loss scale",
        Loop(loss=lambda out, y: 1e8 * squared(out, y), lr=1e-12, scale=65536.0, steps=28),
        Cause.SCALE_OVERFLOW,
        "aten._to_copy.default",
        module="",
        phase="backward",
        step=0,
    ),
    Failure(
        "gradient too small",
        Loop(loss=lambda out, y: 1e-9 * squared(out, y), scale=1.0),
        Cause.FP16_UNDERFLOW,
        "aten._to_copy.default",
        module="",
        phase="backward",
        step=0,
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
        "saturated",
        Loop(part=lambda h: (h + 12).sigmoid()),
        Cause.STAGNATION,
        "aten.sigmoid.default",
        step=0,
        says="gets no gradient at all",
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
        "updates too small",
        Loop(prepare=lambda net: settled(net).to(torch.bfloat16), lr=1e-6, loss=squared, **_ALONE),
        Cause.BF16_PRECISION,
        "aten.add_.Tensor",
        module="",
        phase="optimizer",
        step=0,
        says="bfloat16",
    ),
    Failure(
        "half parameters",
        Loop(prepare=lambda net: settled(net).half(), lr=1e-7, loss=squared, **_ALONE),
        Cause.HALF_PARAMS,
        "aten.add_.Tensor",
        module="",
        phase="optimizer",
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
    Failure(
        "squared gradient",
        Loop(optimizer=torch.optim.Adam, odd=lambda x: x * 1e22, dtype=torch.bfloat16, scale=None),
        Cause.BAD_OPTIMIZER_STATE,
        "aten.addcmul_.default",
        module="body",
        phase="optimizer",
        says="exp_avg_sq",
    ),
    Failure(
        "positions",
        Loop(part=positions, dtype=torch.bfloat16, scale=None),
        Cause.INFORMATION_LOST,
        _CAST,
        step=0,
        says="2,048 different values of int64 become ",
    ),
    Failure("a long text", Loop(part=partial(positions, upto=30_000)), Cause.INFORMATION_LOST, _CAST, step=0),
    Failure("time stamps", Loop(part=timestamps), Cause.INFORMATION_LOST, _CAST, step=0, says="40 different values"),
    Failure("numbers compared", Loop(part=same_number), Cause.INFORMATION_LOST, _CAST, step=0),
    Failure("a fine clock", Loop(part=clock), Cause.INFORMATION_LOST, _CAST, step=0, says="float32 become"),
    # mathematics
    Failure(
        "p log p", Loop(outputs=4, loss=entropy, odd=lambda x: x * 300), Cause.LOG_ZERO, "aten.log.default", module=""
    ),
    Failure(
        "unit vector",
        Loop(part=lambda h: h.float() / h.float().norm(dim=-1, keepdim=True), odd=zero_row),
        Cause.DIV_ZERO,
        "aten.div.Tensor",
    ),
    Failure(
        "empty mean",
        Loop(loss=lambda out, y: (out[y > 0] - 1).square().mean(), odd_target=torch.zeros_like),
        Cause.DIV_ZERO,
        "aten.mean.default",
        module="",
    ),
    Failure(
        "negative root",
        Loop(part=lambda h: torch.sqrt(h.float() + 10), odd=lambda x: x - 50),
        Cause.SQRT_NEGATIVE,
        "aten.sqrt.default",
    ),
    Failure(
        "root at zero",
        Loop(part=lambda h: h * h.float().square().sum(-1, keepdim=True).sqrt(), odd=zero_row),
        Cause.SQRT_GRAD_ZERO,
        "aten.div.Tensor",
        phase="backward",
    ),
    Failure(
        "power at zero",
        Loop(part=lambda h: h.float().abs().pow(0.5), odd=zero_row),
        Cause.POW_GRAD_ZERO,
        "aten.pow.Tensor_Scalar",
        phase="backward",
    ),
    Failure(
        "arc cosine at one",
        Loop(part=lambda h: h.float().cos().acos(), odd=zero_row),
        Cause.DIV_ZERO,
        "aten.rsqrt.default",
        phase="backward",
        says="The slope of acos is infinite at 1",
    ),
    Failure("where", Loop(part=log_where_positive, odd=zero_row), Cause.WHERE_GRAD_TRAP, "aten.log.default"),
    Failure("masked row", Loop(part=zeros_masked, odd=zero_row), Cause.ALL_MASKED_SOFTMAX, "aten._softmax.default"),
    Failure(
        "masked row by hand",
        Loop(part=zeros_masked_by_hand, odd=zero_row),
        Cause.ALL_MASKED_SOFTMAX,
        "aten.sub.Tensor",
    ),
    Failure(
        "alignment",
        Loop(outputs=8, loss=ctc, odd_target=lambda y: torch.full_like(y, 2.0)),
        Cause.CTC_INFEASIBLE,
        "aten._ctc_loss.Tensor",
        module="",
    ),
    Failure(
        "learning rate",
        Loop(part=lambda h: h.float(), lr=30.0, loss=squared, dtype=torch.bfloat16, scale=None, steps=40),
        Cause.DIVERGENCE,
        "",
        module="",
        step=-1,
    ),
    # from outside
    Failure("batch", Loop(odd=nan_row), Cause.BAD_INPUT, "input", module="body", says="index 1, 3"),
    Failure("target", Loop(odd_target=nan_row), Cause.BAD_INPUT, "input", module="", says="index 1, 3"),
    Failure("weight", Loop(prepare=poisoned_weight), Cause.BAD_WEIGHT, "parameter", module="head", step=0),
    Failure("buffer", Loop(part=Offset), Cause.BAD_BUFFER, "buffer", step=0),
    Failure(
        "buffer poisoned early",
        Loop(part=Centred, odd=lambda x: x * 900, steps=8),
        Cause.FP16_OVERFLOW,
        "aten.pow.Tensor_Scalar",
    ),
    Failure("bit", Loop(part=Struck), Cause.HARDWARE_TRANSIENT, "aten.addmm.default", module="part.lin"),
]
