"""Small models that hold tensors of their own in plain attributes, each way poisoned once, or healthy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BATCH, WIDTH = 4, 8
#: The step that leaves something behind which is not finite, the first that reads it late, and how many there are.
BAD, LATE, STEPS = 6, 9, 14
LOUD = 1e3  #: whose square float16 does not hold

Watch = Callable[[nn.Module, Any], object]


@dataclass
class State:
    """What a layer remembers, as people write it."""

    hidden: Tensor | None = None
    past: list[Tensor] = field(default_factory=list)
    by_name: dict[str, Tensor] = field(default_factory=dict)


class Holder(nn.Module):
    """A recurrent layer; how it remembers is told by its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.state = State()

    def read(self) -> Tensor | None:
        raise NotImplementedError

    def write(self, square: Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor, loud: bool) -> Tensor:
        before = self.read()
        half = (x * (LOUD if loud else 1.0)).detach().half()
        self.write(half * half * 0.1)  # a power is computed in float32 on an accelerator
        self.steps += 1
        return x if before is None else x + before


class Hidden(Holder):
    hidden: Tensor | None = None

    def read(self) -> Tensor | None:
        return self.hidden

    def write(self, square: Tensor) -> None:
        self.hidden = square


class Late(Hidden):
    """What was left is read some steps later for the first time."""

    def read(self) -> Tensor | None:
        return self.hidden if self.steps >= LATE else None

    def write(self, square: Tensor) -> None:
        if self.steps <= BAD:
            self.hidden = square


class Mean(Holder):
    """Written in place, and divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH).half()

    def read(self) -> Tensor | None:
        return 1 / (1 + self.mean.float())

    def write(self, square: Tensor) -> None:
        self.mean.mul_(0.5).add_(square.mean(0))


class InDataclass(Holder):
    def read(self) -> Tensor | None:
        return self.state.hidden

    def write(self, square: Tensor) -> None:
        self.state.hidden = square


class InList(Holder):
    def read(self) -> Tensor | None:
        return self.state.past[-1] if self.state.past else None

    def write(self, square: Tensor) -> None:
        self.state.past.append(square)
        del self.state.past[:-2]


class InDict(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def read(self) -> Tensor | None:
        return self.cache.get("hidden")

    def write(self, square: Tensor) -> None:
        self.cache["hidden"] = square


def _mask(hidden: int, device: torch.device) -> Tensor:
    return torch.zeros(WIDTH, device=device).masked_fill(torch.arange(WIDTH, device=device) < hidden, -torch.inf)


class Mask(Holder):
    """A new mask in each step, which a softmax reads in the next."""

    mask: Tensor | None = None

    def read(self) -> Tensor | None:
        return None if self.mask is None else self.mask.softmax(-1)

    def write(self, square: Tensor) -> None:
        self.mask = torch.zeros(WIDTH, device=square.device).masked_fill(
            torch.arange(WIDTH, device=square.device) < self.steps % 3, -torch.inf
        )


class Masks(Holder):
    """A cache of masks, one more in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, Tensor] = {}

    def read(self) -> Tensor | None:
        return self.masks[self.steps - 1].softmax(-1) if self.masks else None

    def write(self, square: Tensor) -> None:
        self.masks[self.steps] = torch.zeros(WIDTH, device=square.device).masked_fill(
            torch.arange(WIDTH, device=square.device) < 2, -torch.inf
        )


class Shown(Hidden):
    """What is left is for someone to look at."""

    def read(self) -> Tensor | None:
        return None


HOLDERS = (Hidden, Late, Mean, InDataclass, InList, InDict)
HARMLESS = (Mask, Masks)


class _Net(nn.Module):
    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self.body, self.holder, self.head = nn.Linear(WIDTH, WIDTH), holder, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, loud: bool) -> Tensor:
        out: Tensor = self.head(self.holder(torch.tanh(self.body(x)), loud))
        return out


def train(
    kind: type[Holder],
    watch: Watch,
    *,
    poisoned: bool,
    loss_fails_at: int = -1,
    device: str = "cpu",
    fused: bool = False,
) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        model = _Net(kind())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler(device, init_scale=16.0)
    watch(model, scaler)
    for step in range(STEPS):
        with torch.autocast(device, dtype=torch.float16):
            out = model(torch.randn(BATCH, WIDTH, device=device), poisoned and step == BAD)
        loss = out.float().square().mean()
        if step == loss_fails_at:
            loss = (loss * 0).log()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
