"""Keeps what a loop does to its gradients in a step that was heard, for a step in which nobody listened.

Its calls refer to gradients by their parameters, so they can be put onto the tape of another step of the same loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ampscope.capture.replay.tape.call_tape import Tape
from ampscope.capture.replay.tape.entry import (
    Arguments,
    EarlierResult,
    Entry,
    OutsideTensor,
    TensorReference,
    UnscaledGradients,
)
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.torch_private import version_counter

#: Bytes that the calls may keep alive, of what they read beside weights and gradients.
MOST_KEPT = 1 << 20


class LearnedEdits(NamedTuple):
    """The calls after the last backward of a step, numbered from the step's first entry."""

    after: int  #: entries that come before them
    entries: list[Entry]
    assigned: dict[str, EarlierResult]  #: gradients that they made, by name of the parameter

    @staticmethod
    def of(tape: Tape, models: Models, since: int, after: int) -> LearnedEdits | None:
        """Takes the edits of the step on a tape, as far as another step can be expected to make the same.

        Args:
            tape: The tape.
            models: The watched models.
            since: Number of the step's first entry.
            after: Number of the first after the last backward.

        Returns:
            None where they draw random numbers, write what only this step had, or follow a number that Python read.
        """
        found = tape.entries[after - tape.start :]
        reads = any(after <= at < tape.end for at, _ in tape.results.given_to_python)
        if not found or reads or any(entry.state.random is not None for entry in found):
            return None
        kept = {id(each.tensor): each for entry in found for each in entry.arguments.outside}
        if any(each.identity != id(each.tensor) for each in kept.values()) or _bytes(kept, models) > MOST_KEPT:
            return None
        writes = [entry.arguments.tensors[0] for entry in found if entry.in_place and entry.arguments.tensors]
        refers = [result.entry for entry in found for result in (*entry.arguments.earlier, *entry.also_writes)]
        if any(isinstance(target, OutsideTensor) for target in writes) or min(refers, default=since) < since:
            return None
        moved = [_moved(entry, lambda number: number - since) for entry in found]
        made = tape.results.assigned(models, after).items()
        return LearnedEdits(after - since, moved, {name: EarlierResult(at.entry - since, at.leaf) for name, at in made})

    def put(self, tape: Tape, models: Models, since: int, *, unscaled: bool) -> None:
        """Puts them onto the tape of the present step.

        Args:
            tape: The tape.
            models: The watched models.
            since: Number of the step's first entry.
            unscaled: Those too that come once its gradients were unscaled; else those alone that come before.
        """
        for number, entry in enumerate(self.entries, self.after):
            if isinstance(entry.arguments, UnscaledGradients) and not unscaled:
                break
            if number + since == tape.end:
                tape.entries.append(_moved(entry, lambda known: known + since))
        for name, parameter in models.parameters.values():
            made = self.assigned.get(name)
            if made is not None and parameter.grad is not None and made.entry + since < tape.end:
                tape.results.add(parameter.grad, EarlierResult(made.entry + since, made.leaf))


def _moved(entry: Entry, number: Callable[[int], int]) -> Entry:
    """An entry that stands elsewhere, and reads what is outside as it is now."""
    references: list[TensorReference] = []

    def moved(reference: TensorReference) -> TensorReference:
        if isinstance(reference, EarlierResult):
            references.append(EarlierResult(number(reference.entry), reference.leaf))
        elif isinstance(reference, OutsideTensor):
            tensor = reference.tensor
            references.append(OutsideTensor(tensor, version_counter(tensor), id(tensor)))
        else:
            references.append(reference)
        return references[-1]

    if isinstance(entry.arguments, UnscaledGradients):
        return entry
    args, kwargs = tensor_tree.rebuild((entry.arguments.args, entry.arguments.kwargs), moved, TensorReference)
    also = [EarlierResult(number(each.entry), each.leaf) for each in entry.also_writes]
    return replace(entry, arguments=Arguments(args, kwargs, references), also_writes=also)


def _bytes(kept: dict[int, OutsideTensor], models: Models) -> int:
    return sum(each.tensor.nbytes for key, each in kept.items() if key not in models.parameters)
