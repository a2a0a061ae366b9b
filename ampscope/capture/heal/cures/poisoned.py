"""Buffers that were poisoned: what they held when they were last finite."""

from __future__ import annotations

import torch
from torch import Tensor

from ampscope.capture.replay.state.state_snapshot import StateSnapshot
from ampscope.capture.torch_support.models import Models
from ampscope.capture.tracing.statistics.stats import can_be_bad, finite

#: A poisoned buffer by name: itself, what the step found there, and its last finite value.
Poisoned = dict[str, tuple[Tensor, Tensor, Tensor]]


def found(state: StateSnapshot, models: Models) -> Poisoned:
    """The buffers that a step found not finite, and that were finite when the step before it began."""
    poisoned: Poisoned = {}
    for module, name, buffer in models.buffers():
        if not can_be_bad(buffer):
            continue
        start, before = state.at_start(buffer), state.at_step_before(buffer)
        if start is not None and before is not None and not finite(start) and finite(before):
            poisoned[".".join(filter(None, (module, name)))] = buffer, start, before.clone()
    return poisoned


def begin_from(state: StateSnapshot, poisoned: Poisoned, *, finite_values: bool) -> None:
    """Has replays of the step begin from the last finite values, or from what it really found."""
    for buffer, start, before in poisoned.values():
        state.restore(buffer, before if finite_values else start)


def put_back(poisoned: Poisoned) -> None:
    """Gives the model's own buffers their last finite values."""
    with torch.no_grad():
        for buffer, _, before in poisoned.values():
            buffer.copy_(before)


def undo_of_step(state: StateSnapshot, models: Models) -> list[str]:
    """Gives buffers back what they held before a step that has made them non-finite; returns their names."""
    undone = []
    for module, name, buffer in models.buffers():
        start = state.at_start(buffer) if can_be_bad(buffer) and not finite(buffer) else None
        if start is not None and finite(start):
            with torch.no_grad():
                buffer.copy_(start)
            undone.append(".".join(filter(None, (module, name))))
    return undone
