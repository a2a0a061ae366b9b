"""Takes over the step's last calls before the loop moved weights, as the beginning of what is taken down after them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ampscope.capture.replay.tape.call_tape import Tape
from ampscope.capture.replay.tape.dependencies import gives_gradients
from ampscope.capture.replay.tape.entry import (
    Arguments,
    EarlierResult,
    Entry,
    EntryKind,
    GradientOf,
    OutsideTensor,
    TensorReference,
)
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.torch_private import version_counter


class TakenOver(NamedTuple):
    """The calls after the latest that gave gradients, as far as it is known what they read, numbered from 0."""

    entries: list[Entry]
    results: list[tuple[Tensor, EarlierResult]]  #: of theirs, what is alive


class Latest(NamedTuple):
    """The calls that a step has made since it got its gradients, as its tape holds them."""

    entries: list[tuple[int, Entry]]
    alive: dict[tuple[int, int], Tensor]  #: results, by entry and leaf

    @staticmethod
    def of(tape: Tape) -> Latest:
        """Returns the latest calls on a tape."""
        start = tape.end
        while start > tape.start and not gives_gradients(tape[start - 1]):
            start -= 1
        alive = {(source.entry, source.leaf): tensor for tensor, source in tape.results.alive()}
        entries = [(number, tape[number]) for number in range(start, tape.end)] if start > tape.start else []
        return Latest(entries, alive)

    def renumbered(self, gradients: Mapping[int, Tensor]) -> TakenOver:
        """Returns these calls numbered from 0, without those whose operands are not known any more.

        Args:
            gradients: As they were left, by ``id`` of the parameter.
        """
        numbers: dict[int, int] = {}
        entries: list[Entry] = []
        for number, entry in self.entries:
            found = _renumbered(entry, numbers, self.alive, gradients)
            if found is not None:
                numbers[number] = len(entries)
                entries.append(found)
        return TakenOver(entries, list(_renumbered_results(self.alive, numbers)))


def _renumbered_results(
    alive: Mapping[tuple[int, int], Tensor], numbers: Mapping[int, int]
) -> Iterator[tuple[Tensor, EarlierResult]]:
    for (number, leaf), tensor in alive.items():
        if number in numbers:
            yield tensor, EarlierResult(numbers[number], leaf)


def _renumbered(
    entry: Entry,
    numbers: Mapping[int, int],
    alive: Mapping[tuple[int, int], Tensor],
    gradients: Mapping[int, Tensor],
) -> Entry | None:
    """An entry that reads what is known here; None where that is not all, or it writes a gradient, as it is by now."""
    references: list[TensorReference] = []

    def known(reference: TensorReference) -> TensorReference:
        if isinstance(reference, EarlierResult) and reference.entry in numbers:
            references.append(EarlierResult(numbers[reference.entry], reference.leaf))
        elif isinstance(reference, OutsideTensor):
            references.append(reference)
        else:
            found = _found(reference, alive, gradients)
            references.append(OutsideTensor(found, version_counter(found), id(found)))
        return references[-1]

    writes_gradient = entry.in_place and any(isinstance(each, GradientOf) for each in entry.arguments.tensors[:1])
    if entry.kind is not EntryKind.FUNCTION or writes_gradient:
        return None
    try:
        args, kwargs = tensor_tree.rebuild((entry.arguments.args, entry.arguments.kwargs), known, TensorReference)
    except KeyError:
        return None
    also = [EarlierResult(numbers[each.entry], each.leaf) for each in entry.also_writes if each.entry in numbers]
    return replace(entry, arguments=Arguments(args, kwargs, references), also_writes=also)


def _found(
    reference: TensorReference, alive: Mapping[tuple[int, int], Tensor], gradients: Mapping[int, Tensor]
) -> Tensor:
    """Returns the tensor that a reference stands for, as it is now.

    Raises:
        KeyError: The tensor is gone.
    """
    if isinstance(reference, GradientOf):
        return gradients[reference.parameter]
    if isinstance(reference, EarlierResult):
        return alive[reference.entry, reference.leaf]
    raise KeyError(reference)
