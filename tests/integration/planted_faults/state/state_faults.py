"""Modules and optimizers whose state goes bad: what a plant in the state of a training is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Averages(nn.Module):
    """Stands in for a norm, and keeps the mean of its squares; the result is divided by that only while `reads`."""

    power: Tensor

    def __init__(self, norm: nn.Module, dtype: torch.dtype, momentum: float, start: float) -> None:
        super().__init__()
        self.norm = norm
        self.momentum = momentum
        self.loudness = 1.0
        self.reads = False
        self.register_buffer("power", torch.full((), start, dtype=dtype))

    @property
    def weight(self) -> Tensor:
        weight = self.norm.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        with torch.no_grad():
            power = (x.float() * self.loudness).square().mean().to(self.power.dtype)
            self.power.mul_(1 - self.momentum).add_(power, alpha=self.momentum)
        return x / (1 + self.power.to(x.dtype)) if self.reads else x


def averages(dtype: torch.dtype, momentum: float = 0.1, start: float = 1.0) -> Callable[[nn.Module], nn.Module]:
    return lambda norm: Averages(norm, dtype, momentum, start)


class Normalised(torch.optim.Optimizer):
    """Steps of the same length in each row, whatever the gradient: ``g / (norm + eps)``, until ``eps`` is zero."""

    def __init__(self, parameters: Any, lr: float = 1e-3, eps: float = 1e-8) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    rows = gradient.norm(dim=-1, keepdim=True) + group["eps"]
                    parameter.add_(gradient / rows, alpha=-group["lr"])


class HalfMoments(torch.optim.Optimizer):
    """A second moment for each weight, kept in ``dtype``; Adam without the first one, and with an eps that damps it."""

    def __init__(self, parameters: Any, lr: float = 1e-3, dtype: torch.dtype = torch.float16) -> None:
        super().__init__(parameters, {"lr": lr})
        self.dtype_name = str(dtype).removeprefix("torch.")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if gradient is None:
                    continue
                if not state:
                    state["square"] = torch.zeros_like(parameter, dtype=getattr(torch, self.dtype_name))
                square = state["square"]
                square.mul_(0.99).add_(gradient.square().to(square.dtype), alpha=0.01)
                parameter.sub_(group["lr"] * gradient / (square.float().sqrt() + 1e-2))
