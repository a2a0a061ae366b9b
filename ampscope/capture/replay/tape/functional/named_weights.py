"""Weights that a loop keeps by itself, by name, and gives to a model in the place of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ampscope.capture.replay.tape.call_tape import Tape
from ampscope.capture.replay.tape.entry import EarlierResult, OutsideTensor, TensorReference
from ampscope.capture.torch_support.models import Models


def named(value: Any, models: Models) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested tuples, lists and dictionaries that stand under the name of a parameter, with its shape.

    Those of several models, stacked, have one dimension more in front.
    """
    shapes = {name: parameter.shape for name, parameter in models.parameters.values()}
    for name, each in under_names(value, models):
        if isinstance(each, Tensor) and shapes[name] in (each.shape, each.shape[1:]):
            yield name, each


def under_names(value: Any, models: Models) -> Iterator[tuple[str, Any]]:
    """Yields what stands under the name of a parameter in nested tuples, lists and dictionaries."""
    names = {name for name, _ in models.parameters.values()}
    front = [value]
    while front:
        each = front.pop()
        if isinstance(each, (list, tuple)):
            front += each
        elif isinstance(each, Mapping):
            yield from ((name, inside) for name, inside in each.items() if name in names)


def were_updated(tape: Tape, asked: Sequence[int], weights: Iterator[tuple[str, Tensor]]) -> bool:
    """Whether a loop has made any of ``weights`` of the gradients that it has asked for, or written it with them.

    Not where autograd goes on through them: an inner step of meta-learning is a part of its step.

    Args:
        tape: The tape.
        asked: Numbers of the entries that gave gradients.
        weights: That the loop is about to use.
    """
    derived: set[int] | None = None
    for _, tensor in weights:
        known = tape.results.find(tensor)
        if known is not None and known.source.entry > asked[0] and tensor.grad_fn is None:
            derived = {number for number, _ in _derived(tape, asked)} if derived is None else derived
            if known.source.entry in derived:
                return True
    return False


def update_was_made(tape: Tape, asked: Sequence[int]) -> bool:
    """Whether a loop has put gradients together with what they were asked of: with its weights.

    Args:
        tape: The tape.
        asked: Numbers of the entries that gave gradients.
    """
    operands = {_key(each) for number in asked if number >= tape.start for each in tape[number].arguments.tensors}
    return any(_key(each) in operands for _, reads in _derived(tape, asked) for each in reads)


def come_of(tape: Tape, asked: Sequence[int], values: Iterable[Tensor]) -> bool:
    """Whether any of ``values`` was computed from what the entries ``asked`` gave, or is that itself."""
    derived = {*asked, *(number for number, _ in _derived(tape, asked))}
    return any((known := tape.results.find(each)) is not None and known.source.entry in derived for each in values)


def _derived(tape: Tape, asked: Sequence[int]) -> Iterator[tuple[int, list[TensorReference]]]:
    """The entries that compute with gradients, or with what came of them: their numbers, and what they read."""
    derived = set(asked)
    for number in range(max(min(asked, default=tape.end) + 1, tape.start), tape.end):
        reads = list(tape[number].arguments.tensors)
        if any(isinstance(each, EarlierResult) and each.entry in derived for each in reads):
            derived.add(number)
            yield number, reads


def _key(reference: TensorReference) -> object:
    if isinstance(reference, EarlierResult):
        return reference.entry, reference.leaf
    return reference.identity if isinstance(reference, OutsideTensor) else reference
