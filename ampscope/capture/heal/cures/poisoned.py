"""Finds buffers and tensors in plain attributes that were poisoned, with what they held when they were last finite."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture.replay.state.state_snapshot import StateSnapshot
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.statistics.stats import can_be_bad, finite


class PoisonedBuffer(NamedTuple):
    """A buffer, or a tensor in a plain attribute, that a step found not finite."""

    module: nn.Module
    name: str
    tensor: Tensor  #: that it was when the step began
    found: Tensor  #: what it held then
    before: Tensor  #: its last finite value


#: By qualified name.
Poisoned = dict[str, PoisonedBuffer]


def found(state: StateSnapshot, models: Models) -> Poisoned:
    """Finds what was not finite as a step began, but was as the step before it did."""
    poisoned: Poisoned = {}
    for module, name, _ in state.statistics():
        tensor, before = state.buffer(module, name), state.buffer_before(module, name)
        start = state.at_start(tensor) if tensor is not None and can_be_bad(tensor) else None
        if tensor is not None and start is not None and before is not None and not finite(start) and finite(before):
            poisoned[_name(module, name, models)] = PoisonedBuffer(module, name, tensor, start, before.clone())
    return poisoned


def out_of_reach(state: StateSnapshot) -> str:
    """A tensor in what an attribute holds that a step found not finite; empty where there is none."""
    nested = (each for each in state.attribute_tensors() if each.is_nested)
    starts = ((each.name, state.at_start(each.tensor)) for each in nested)
    return next((name for name, start in starts if start is not None and not finite(start)), "")


def begin_from(state: StateSnapshot, poisoned: Poisoned, *, finite_values: bool) -> None:
    """Has replays of the step begin from the last finite values, or from what it really found."""
    for each in poisoned.values():
        state.restore(each.tensor, each.before if finite_values else each.found)


def put_back(poisoned: Poisoned) -> None:
    """Gives the model's own their last finite values."""
    for each in poisoned.values():
        give(each.module, each.name, each.tensor, each.before)


def undo_of_step(state: StateSnapshot) -> None:
    """Gives back what they held before a step that has made them non-finite."""
    for module, name, buffer in list(state.statistics()):
        tensor = state.buffer(module, name) if can_be_bad(buffer) and not finite(buffer) else None
        start = state.at_start(tensor) if tensor is not None else None
        if start is not None and finite(start):
            give(module, name, tensor, start)


def give(module: nn.Module, name: str, tensor: Tensor | None, value: Tensor) -> None:
    """Gives a buffer or an attribute a value: in place, where it is still ``tensor``; else as a new tensor."""
    where: Any = module._buffers if name in module._buffers else vars(module)
    held = where.get(name)
    if not isinstance(held, Tensor):
        return
    if held is tensor and held.shape == value.shape:
        with torch.no_grad():
            held.copy_(value)
    else:
        where[name] = value.detach().to(held.dtype, copy=True)


def _name(module: nn.Module, name: str, models: Models) -> str:
    return ".".join(filter(None, (models.names[id(module)], name)))
