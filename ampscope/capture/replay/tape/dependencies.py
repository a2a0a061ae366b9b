"""Finds the part of a tape that a step is made of, with all that it depends on, and how long a replay holds results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ampscope.capture.replay.memory import collector
from ampscope.capture.replay.tape.call_tape import Tape
from ampscope.capture.replay.tape.entry import EarlierResult, Entry, EntryKind, GradientOf, TensorReference


def needed(entries: Sequence[Entry], start: int, since: int, also: Iterable[int] = ()) -> list[int]:
    """Numbers of the entries that make the step which begins at ``since``.

    These are its backward passes, its differentiable module calls (they may change buffers), and whatever those
    depend on, before ``since`` too.

    Args:
        entries: The entries of the tape.
        start: Number of the first of them.
        since: Number of the first entry of the step.
        also: Further entries that are asked for.
    """
    writers: dict[int, list[int]] = {}  # entry -> the in-place entries that change its results later
    front = list(also)
    for number, entry in enumerate(entries, start):
        if number >= since and (entry.kind is EntryKind.BACKWARD or entry.is_training_call) and number not in front:
            front.append(number)
        for result in entry.also_writes:
            writers.setdefault(result.entry, []).append(number)
    wanted = set(front)
    while front:
        number = front.pop()
        read = [result.entry for result in entries[number - start].earlier]
        for other in (*read, *writers.get(number, ())):
            if other not in wanted and other >= start:
                wanted.add(other)
                front.append(other)
    return sorted(wanted)


def written_after_backward(entries: Sequence[Entry], start: int, since: int) -> tuple[int, ...]:
    """Numbers of the entries that write in place after the last backward of a step.

    Args:
        entries: The entries of the tape.
        start: Number of the first of them.
        since: Number of the first entry of the step.
    """
    numbered = list(enumerate(entries, start))
    backwards = [number for number, entry in numbered if number >= since and entry.kind is EntryKind.BACKWARD]
    return tuple(number for number, entry in numbered if entry.in_place and backwards and number > backwards[-1])


def made_of_gradients(tape: Tape, values: Iterable[Tensor]) -> bool:
    """Whether any of ``values`` is a gradient, or was computed from such ones."""
    derived: set[int] = set()
    for number, entry in enumerate(tape.entries, tape.start):
        reads = entry.arguments.tensors
        if gives_gradients(entry) or any(isinstance(each, GradientOf) or _is_of(each, derived) for each in reads):
            derived.add(number)
    found = ((tape.gradients.find(each), tape.results.find(each)) for each in values)
    return any(left is not None or (made is not None and made.source.entry in derived) for left, made in found)


def gives_gradients(entry: Entry) -> bool:
    """Whether an entry gives gradients, to parameters or to the loop."""
    asked = entry.call is torch.autograd.grad or (entry.through is not None and bool(entry.through.leaves))
    return asked or entry.kind is EntryKind.BACKWARD


def _is_of(reference: TensorReference, entries: set[int]) -> bool:
    return isinstance(reference, EarlierResult) and reference.entry in entries


class HeldResults:
    """Holds the results of a replay's calls as long as they are read: micro-batches need not be there together.

    Args:
        entries: Those that are run, each with its number.
        read_last: What is read when all have run.
    """

    def __init__(self, entries: Iterable[tuple[int, Entry]], read_last: Iterable[EarlierResult]) -> None:
        self._last_readers = {result.entry: number for number, entry in entries for result in entry.earlier}
        self._read_last = {result.entry for result in read_last}
        self._held: dict[int, list[Tensor]] = {}

    def put(self, number: int, results: list[Tensor]) -> None:
        """An entry has returned."""
        self._held[number] = results

    def of(self, reference: EarlierResult) -> Tensor:
        """Returns the result of an entry."""
        return self._held[reference.entry][reference.leaf]

    def was_run(self, number: int, entry: Entry) -> None:
        """Lets go of what no later entry reads, and of what has become garbage meanwhile."""
        for read in {number, *(result.entry for result in entry.earlier)} - self._read_last:
            if self._last_readers.get(read, number) <= number:
                self._held.pop(read, None)
        collector.collect()

    def clear(self) -> None:
        """Lets go of everything."""
        self._held.clear()


class _Holder(Protocol):
    def clear(self) -> None: ...


@contextlib.contextmanager
def cleared_on_failure(*holders: _Holder) -> Iterator[None]:
    """Lets go of what a replay that fails has held: the allocator can give back only what nobody holds."""
    try:
        yield
    except BaseException:
        for each in holders:
            each.clear()
        raise
