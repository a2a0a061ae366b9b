"""What an optimizer's step would write if nothing of it were rounded to half precision: its step on float32 copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.step.measures.stillness import LARGER
from ampscope.capture.torch_support.calls.random_state import random_state_kept
from ampscope.capture.torch_support.dtypes import HALF
from ampscope.capture.torch_support.guard import Suppressed
from ampscope.capture.torch_support.optimizer_view import OptimizerView


class Float32Step:
    """An optimizer's coming step, made on copies of some of its parameters; nothing of the training is different after.

    Args:
        optimizer: The optimizer; a `plain` one.
        parameters: Those that take part; they have gradients.
        larger: Whether what it keeps in half precision begins larger by a factor, see `enlarged`.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], *, larger: bool = False) -> None:
        widened: Callable[[Tensor], Tensor] = _larger if larger else _wide
        self._copies = {id(parameter): _copied(parameter) for parameter in parameters}
        self._again: Any = OptimizerView(optimizer).copied_onto(self._copies, widened)
        step = type(optimizer).step
        with random_state_kept(), Suppressed() as suppressed:
            getattr(step, "__wrapped__", step)(self._again)
        self.failed = suppressed.error is not None

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """What the step leaves of a parameter (float32)."""
        return self._copies[id(parameter)].detach()

    def state(self, parameter: nn.Parameter, key: str) -> Tensor | None:
        """What it leaves of its state of a parameter; None where it keeps that no more."""
        value = self._again.state[self._copies[id(parameter)]].get(key)
        return value if isinstance(value, Tensor) else None


def enlarged(tensor: Tensor) -> Tensor:
    """The values with which state begins where it begins larger."""
    return torch.where(tensor == 0, torch.ones_like(tensor), tensor * LARGER)


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    copy = nn.Parameter(_wide(parameter))
    assert parameter.grad is not None
    copy.grad = _wide(parameter.grad)
    return copy


def _wide(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    return plain.float() if plain.dtype in HALF else plain.clone()


def _larger(tensor: Tensor) -> Tensor:
    return enlarged(_wide(tensor)) if tensor.dtype in HALF else _wide(tensor)
