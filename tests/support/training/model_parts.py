"""Parts of a model with the types that a test knows them to have, where torch knows ``Tensor | Module`` alone."""

from __future__ import annotations

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
