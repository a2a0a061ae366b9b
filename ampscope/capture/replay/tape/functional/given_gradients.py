"""Gradients that no backward has left: what ``torch.autograd.grad`` and transforms of torch.func have given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.replay.tape.call_tape import Tape
from ampscope.capture.replay.tape.entry import EarlierResult, Entry, OutsideTensor
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.models import Models


class Given(NamedTuple):
    """The gradient of a parameter, and which entry made it."""

    gradient: Tensor
    source: EarlierResult


def given(tape: Tape, since: int, models: Models) -> dict[str, Given]:
    """The gradients of the step that begins at ``since``, by parameter: those assigned, else those that were asked for.

    Args:
        tape: The tape.
        since: Where the step begins.
        models: The watched models.
    """
    found: dict[str, Given] = {}
    for name, parameter in models.parameters.values():
        known = tape.results.find(parameter.grad) if parameter.grad is not None else None
        if parameter.grad is not None and known is not None and known.source.entry >= since:
            found[name] = Given(parameter.grad, known.source)
    if not found:
        for number, entry in _asking(tape, since):
            for name, leaf in _named(entry, models).items():
                source = EarlierResult(number, leaf)
                gradient = tape.results.made_by(source)
                if gradient is not None:
                    found[name] = Given(gradient, source)
    return found


def losses(tape: Tape, since: int) -> list[Tensor]:
    """What ``torch.autograd.grad`` was asked to differentiate."""
    return [loss for _, entry in _asking(tape, since) if entry.through is None for loss in entry.fingerprint]


def asked(tape: Tape, since: int) -> bool:
    """Whether gradients were asked for."""
    return next(_asking(tape, since), None) is not None


def _asking(tape: Tape, since: int) -> Iterator[tuple[int, Entry]]:
    for number in range(max(since, tape.start), tape.end):
        entry = tape[number]
        if entry.call is torch.autograd.grad or (entry.through is not None and entry.through.leaves):
            yield number, entry


def _named(entry: Entry, models: Models) -> dict[str, int]:
    """Which result of an entry is the gradient of which parameter."""
    if entry.through is not None:
        return entry.through.leaves
    _, inputs, *_ = (*entry.arguments.args, entry.arguments.kwargs.get("inputs"), None)
    references = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    known = [models.parameters.get(each.identity) if isinstance(each, OutsideTensor) else None for each in references]
    return {found[0]: leaf for leaf, found in enumerate(known) if found is not None}


def leaves(result: Any, models: Models) -> dict[str, int]:
    """Which tensors in what a transform returned are gradients of parameters: those under a parameter's name."""
    order = {id(tensor): leaf for leaf, tensor in enumerate(tensor_tree.tensors(result))}
    shapes = {name: parameter.shape for name, parameter in models.parameters.values()}
    found: dict[str, int] = {}
    front = [result]
    while front:
        value = front.pop()
        if isinstance(value, (list, tuple)):
            front += value
        elif isinstance(value, Mapping):
            named = ((name, each) for name, each in value.items() if isinstance(each, Tensor))
            found |= {name: order[id(each)] for name, each in named if shapes.get(name) == each.shape}
    return found
