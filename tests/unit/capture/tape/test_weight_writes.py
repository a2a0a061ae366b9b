"""Which torch functions write into the weights that a step trains, seen before they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ampscope.capture.tape.weight_writes import WeightWrites
from ampscope.capture.torch_support.models import Models
from tests.support.training.model_parts import grad_of

Act = Callable[[nn.Linear], object]


class Watching(TorchFunctionMode):
    """Keeps the weights of a model that functions are about to write."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._writes = WeightWrites(Models([model]))
        self.written: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.written += self._writes.written(func, args, kwargs or {})
        return func(*args, **kwargs or {})


def written(act: Act) -> list[str]:
    """Names of the weights that ``act`` writes in a model that has been run backward."""
    model = nn.Linear(3, 3)
    model(torch.ones(2, 3)).square().mean().backward()
    with Watching(model) as watching, torch.no_grad():
        act(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return list(dict.fromkeys(names[id(weight)] for weight in watching.written))


def _set_data(model: nn.Linear) -> None:
    model.weight.data = model.weight.data * 2


def _set_row(model: nn.Linear) -> None:
    model.weight[1] = 0.0


def _clear(model: nn.Linear) -> None:
    model.weight.grad = None


@pytest.mark.parametrize(
    "act",
    [
        lambda model: model.weight.add_(1.0),
        lambda model: model.weight.data.add_(1.0),
        lambda model: model.weight.detach().mul_(2.0),
        lambda model: model.weight.data[1:].zero_(),
        lambda model: model.weight.view(-1).zero_(),
        lambda model: model.weight.copy_(torch.ones(3, 3)),
        lambda model: torch._foreach_mul_([model.weight], 2.0),
        lambda model: torch.add(model.weight, 1.0, out=model.weight),
        lambda model: nn.init.zeros_(model.weight),
        _set_data,
        _set_row,
    ],
)
def test_a_write_is_seen(act: Act) -> None:
    assert written(act) == ["weight"]


@pytest.mark.parametrize(
    "act",
    [
        lambda model: model.weight + 1.0,
        lambda model: model.weight.requires_grad_(requires_grad=False).requires_grad_(),
        lambda model: model.weight.data.clone().add_(1.0),
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda model: grad_of(model.weight).mul_(2.0),
        lambda model: torch.zeros(3).add_(1.0),
        lambda model: model.weight.requires_grad_(requires_grad=False).add_(1.0),
        _clear,
    ],
)
def test_what_writes_no_trained_weight_is_not(act: Act) -> None:
    assert written(act) == []
