"""Makes an optimizer's step on float32 copies: what it would write if nothing of it were rounded to half precision."""

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

    Attributes:
        failed: Whether it raised.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], *, larger: bool = False) -> None:
        widened: Callable[[Tensor], Tensor] = _larger if larger else _wide
        self._copies = {id(parameter): _copied(parameter) for parameter in parameters}
        self._again: Any = OptimizerView(optimizer).copied_onto(self._copies, widened)
        step = type(optimizer).step
        self._step = getattr(step, "__wrapped__", step)
        self.failed = not self._makes_it()

    def updates(self) -> dict[int, Tensor] | None:
        """The change of each parameter (float32), by ``id`` of it, in one more step with the same gradients.

        None where that raises. An optimizer that keeps what it could not write (Kahan's sum, float32 weights of its
        own) writes all of that in the first step on copies; what one step is to write shows in the next.
        """
        before = {key: copy.detach().clone() for key, copy in self._copies.items()}
        if not self._makes_it():
            return None
        return {key: copy.detach() - before[key] for key, copy in self._copies.items()}

    def _makes_it(self) -> bool:
        with random_state_kept(), Suppressed() as suppressed:
            self._step(self._again)
        return suppressed.error is None

    def state(self, parameter: nn.Parameter, key: str) -> Tensor | None:
        """Returns the state that the step leaves of a parameter; None where the optimizer keeps it no more."""
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
