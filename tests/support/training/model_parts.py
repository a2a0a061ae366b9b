"""Parts of a model with the types that a test knows them to have, where torch knows ``Tensor | Module`` alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def linear(model: nn.Module, name: str) -> nn.Linear:
    """The linear layer of this name, dotted as in ``named_modules``."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


def grad_of(parameter: Tensor) -> Tensor:
    """The gradient that backward has left there."""
    assert parameter.grad is not None
    return parameter.grad


def grad_norm(parameters: Iterable[Tensor]) -> float:
    """The norm of all gradients together, computed in float64."""
    return torch.stack([p.grad.double().norm() for p in parameters if p.grad is not None]).norm().item()
