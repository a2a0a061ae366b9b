"""Names what the calls of a replay read from outside: inputs as the user would, weights as the model does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.replay.tape.entry import Entry, EntryKind, GradientOf, OutsideTensor
from ampscope.capture.replay.tape.functional import named_weights
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.calls import transforms
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.torch_private import storage_key
from ampscope.trace.schema import Node

Named = tuple[Tensor, Node, str]


def names(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], models: Models) -> Iterator[Named]:
    """The tensors that a call of the tape is given, each with what it is and its name.

    Args:
        entry: The call.
        args: Its arguments in the replay.
        kwargs: Its keyword arguments in the replay.
        models: The watched models.
    """
    weights: dict[int, Tensor] = {}
    if entry.through is not None:
        for tensor, name in _weights(entry, args, kwargs, models):
            weights[id(tensor)] = tensor
            yield tensor, Node.PARAMETER, name
        args, kwargs = transforms.given(args, entry.through.inputs), {}
    what = "" if entry.kind is EntryKind.MODULE else f"{getattr(entry.call, '__name__', 'a function')} "
    pairs = zip(tensor_tree.tensors((args, kwargs)), entry.arguments.tensors, strict=False)
    gradients = {id(tensor) for tensor, reference in pairs if isinstance(reference, GradientOf)}
    for name, tensor in named_inputs(args, kwargs):
        if id(tensor) not in weights and id(tensor) not in gradients:
            yield tensor, Node.INPUT, what + name


def _weights(
    entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], models: Models
) -> Iterator[tuple[Tensor, str]]:
    """Yields what takes the place of the model's weights, by their names; also what only lives in their memory."""
    known = {storage_key(p): name for name, p in models.parameters.values() if _has_memory(p)}
    for tensor, reference in zip(tensor_tree.tensors((args, kwargs)), entry.arguments.tensors, strict=True):
        if isinstance(reference, OutsideTensor) and _has_memory(reference.tensor):
            name = known.get(storage_key(reference.tensor))
            if name is not None:
                yield tensor, name
    if entry.through is not None:
        given = args[1] if entry.through.lends else transforms.given(args, entry.through.inputs)
        yield from ((tensor, name) for name, tensor in named_weights.named(given, models))


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def named_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors a module was called with, named as the user would: ``args[0]``, ``input_ids``."""
    for index, value in enumerate(args):
        found = list(tensor_tree.tensors(value))
        for part, tensor in enumerate(found):
            yield f"args[{index}]" if len(found) == 1 else f"args[{index}][{part}]", tensor
    for name, value in kwargs.items():
        found = list(tensor_tree.tensors(value))
        for part, tensor in enumerate(found):
            yield name if len(found) == 1 else f"{name}[{part}]", tensor
