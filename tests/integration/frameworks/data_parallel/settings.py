"""The ways of training with ``DistributedDataParallel`` that are tried: the model, its wrapper, what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.checkpoint import checkpoint

WIDTH = 16
#: Steps of a training, and the one that goes wrong; more than one follows, so that ranks have their turn to tell.
STEPS, BAD = 8, 5


class Square(nn.Module):
    """Overflows float16 from 256 on."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Length(nn.Module):
    """The length of each row: 0 for a row of zeros, where its gradient is not finite."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * x).sum(-1, keepdim=True).sqrt()


class Centred(nn.Module):
    """Takes a running mean away, which every rank keeps of its own batches until it is given that of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.mean
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return centred


class Checkpointed(nn.Module):
    """Computes a part again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class Partly(nn.Module):
    """Leaves a layer out on odd steps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.first, self.square, self.odd = nn.Linear(WIDTH, 32), Square(), nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.square(self.first(x))
        out: Tensor = self.last(self.odd(hidden) if self.calls % 2 else hidden)
        return out


def squares() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), Square(), nn.Linear(32, 4))


def lengths() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32, bias=False), Length(), nn.Linear(1, 4))


def checkpointed() -> nn.Module:
    return nn.Sequential(Checkpointed(nn.Sequential(nn.Linear(WIDTH, 32), Square())), nn.Linear(32, 4))


def centred() -> nn.Module:
    return nn.Sequential(Centred(), nn.Linear(WIDTH, 32), Square(), nn.Linear(32, 4))


def large(batch: Tensor) -> Tensor:
    return batch * 3000


def huge(batch: Tensor) -> Tensor:
    return batch * 1e25


@dataclass(frozen=True)
class Setting:
    """One way of training; what is not said is the plain one: float16, a scaler, one bad batch on the last rank."""

    model: Callable[[], nn.Module] = squares
    dtype: torch.dtype = torch.float16  #: of autocast; float32 for none
    scale: float | None = 256.0  #: initial loss scale; None without a scaler
    bad: Callable[[Tensor], Tensor] = large  #: what makes a batch bad
    everywhere: bool = False  #: on all ranks
    nowhere: bool = False  #: on none: the loss of the last rank is large instead
    micro_batches: int = 1
    each_reduced: bool = False  #: gradients are reduced, and buffers exchanged, with every one of them
    hook: Any = None  #: communication hook
    sum_by_hand: bool = False  #: the loop reduces gradients itself, without a wrapper
    compiled: bool = False
    inner_watched: bool = False  #: what is wrapped is watched, not the wrapper that the loop calls
    uneven: bool = False  #: the last rank has a batch less, within ``Join``
    zeroed: bool = False  #: gradients are kept and set to zero
    options: dict[str, Any] = field(default_factory=dict)  #: of the wrapper

    def steps(self, *, last: bool) -> int:
        """How many steps a rank makes."""
        return STEPS - (self.uneven and last)


SETTINGS = {
    "fp16": Setting(),
    "bf16": Setting(dtype=torch.bfloat16, scale=None, bad=huge),
    "everywhere": Setting(everywhere=True),
    "backward": Setting(model=lengths, bad=torch.zeros_like),
    "accumulated": Setting(micro_batches=3),
    "static": Setting(options={"static_graph": True}),
    "checkpointed": Setting(model=checkpointed, options={"static_graph": True}),
    "unused": Setting(model=Partly, options={"find_unused_parameters": True}),
    "views": Setting(options={"gradient_as_bucket_view": True}, zeroed=True),
    "compressed": Setting(dtype=torch.float32, hook=fp16_compress_hook, scale=None, nowhere=True),
    "uneven": Setting(uneven=True),
    "by hand": Setting(sum_by_hand=True),
    "inner": Setting(inner_watched=True, micro_batches=2),
    "compiled": Setting(compiled=True),
    "buffers": Setting(model=centred, micro_batches=2, each_reduced=True),
    "buffers within": Setting(model=centred, micro_batches=2, each_reduced=True, inner_watched=True),
}
