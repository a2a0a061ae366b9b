"""Holds what a run keeps from step to step, and looks at its values without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ampscope.capture.torch_support.local_shards import local
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.optimizer_view import OptimizerView
from ampscope.capture.torch_support.tensor_tree import inner_tensors
from ampscope.capture.tracing.statistics import stats
from ampscope.capture.tracing.statistics.tensor_values import numbers
from ampscope.trace.schema import Looked, StateKind

#: Elements from which a look by extremes is several times faster than by a norm, on a CPU.
_MANY = 1 << 10
#: Elements of a loop's own tensors that are looked at in one step, in all.
MOST_LOOKED_AT = 1 << 22
#: Dtypes that are measured as they are.
_ORDINARY = frozenset({torch.float32, torch.float16, torch.bfloat16})
_PLAIN = (Tensor, nn.Parameter)


class Held(NamedTuple):
    """A tensor that a run holds from step to step."""

    kind: StateKind
    name: str  #: of a parameter or buffer its qualified name; of optimizer state its key; else what it was called
    owner: str  #: the parameter whose state it is; empty for other kinds
    tensor: Tensor

    @property
    def key(self) -> str:
        """The name by which the tensor is known, with that of its owner."""
        return f"{self.name} of {self.owner}" if self.owner else self.name

    @property
    def module(self) -> str:
        """Qualified name of the module that it, or its parameter, belongs to; empty for the loop's own."""
        if self.kind is StateKind.CARRIED:
            return ""
        return (self.owner or self.name).rpartition(".")[0]


class Seen(NamedTuple):
    """The outcome of looks at a tensor that was found not to be finite."""

    finite_at: int | None  #: the last step after which it was seen finite; None where it never was
    bad_at: int  #: the first step after which it was seen not to be
    when: Looked = Looked.AFTER


class StateHistory:
    """Remembers, of every tensor that was found not to be finite, since when it is so."""

    def __init__(self) -> None:
        self._seen: dict[tuple[StateKind, str], Seen] = {}

    def of(self, held: Held) -> Seen | None:
        """Returns since when a tensor is not finite; None for one that was never seen so."""
        return self._seen.get((held.kind, held.key))

    def note_bad(self, held: Held, *, step: int, finite_at: int | None, when: Looked = Looked.AFTER) -> bool:
        """Takes down that a tensor was not finite after a step; returns whether that is new.

        Args:
            held: The tensor.
            step: The step after which it was looked at.
            finite_at: The step after the last look before; it counts where the tensor is seen bad for the first time.
            when: When in that step it was seen.
        """
        if (held.kind, held.key) in self._seen:
            return False
        self._seen[held.kind, held.key] = Seen(finite_at if finite_at != -1 else None, step, when)
        return True


def weights(models: Models) -> Iterator[Held]:
    """The watched parameters with values that can be looked at; frozen ones are as whoever froze them wants them."""
    for name, parameter in models.parameters.values():
        for tensor in inner_tensors(parameter) or [parameter]:
            if parameter.requires_grad and stats.may_turn_bad(local(tensor)):
                yield Held(StateKind.WEIGHT, name, "", tensor)


def optimizer_state(optimizer: Optimizer, models: Models) -> Iterator[Held]:
    """Yields the state that ``optimizer`` keeps of each watched parameter, as far as it can be looked at.

    Single numbers of larger parameters are left out: best losses and distances begin at infinity.
    """
    view = OptimizerView(optimizer)
    for parameter in view.parameters:
        known, state = models.parameters.get(id(parameter)), view.state.get(parameter)
        if known is None or not isinstance(state, dict):
            continue
        for key, value in state.items():
            if isinstance(value, Tensor) and (value.dim() or not parameter.dim()) and stats.may_turn_bad(local(value)):
                yield Held(StateKind.OPTIMIZER, str(key), known[0], value)


def largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest magnitude of each tensor as a device scalar; not finite where any of its elements is not."""
    with torch.no_grad():
        here = [each if each.dtype in _ORDINARY and type(each) is Tensor else _plain(each) for each in tensors]
        many = {index for index, each in enumerate(here) if each.is_cpu and each.numel() >= _MANY}
        if not many:
            return list(torch._foreach_norm(here, math.inf)) if here else []
        rest = [each for index, each in enumerate(here) if index not in many]
        norms = iter(torch._foreach_norm(rest, math.inf) if rest else ())
        return [_extreme(each) if index in many else next(norms) for index, each in enumerate(here)]


def largest_within(tensors: Sequence[Tensor], most: int = MOST_LOOKED_AT) -> list[Tensor | None]:
    """Measures tensors that may be anything by `largest`; None for those that cannot be looked at.

    Args:
        tensors: Of the loop's own; memory that was given back is not read.
        most: Elements that are looked at, in all.
    """
    chosen: dict[int, Tensor] = {}
    for place, tensor in enumerate(tensors):
        can = type(tensor) in _PLAIN and stats.may_turn_bad(tensor) and tensor.numel() <= most
        if can and tensor.untyped_storage().nbytes():
            most -= tensor.numel()
            chosen[place] = tensor.detach()
    found: list[Tensor | None] = [None] * len(tensors)
    for place, norm in zip(chosen, largest([*chosen.values()]), strict=True):
        found[place] = norm
    return found


def _plain(tensor: Tensor) -> Tensor:
    return numbers(local(tensor).detach())


def _extreme(tensor: Tensor) -> Tensor:
    low, high = torch.aminmax(tensor)
    return torch.maximum(high, -low)
