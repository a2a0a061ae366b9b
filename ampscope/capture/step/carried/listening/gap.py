"""Records what a loop called between two steps: a tape that can be played, with the line at which each call stood."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.replay.tape.call_tape import Tape
from ampscope.capture.replay.tape.entry import EarlierResult, Entry, OutsideTensor
from ampscope.capture.replay.tape.outside_tensors import SMALL_TARGET
from ampscope.capture.step.carried.listening.held_alone import HeldAlone
from ampscope.capture.step.carried.listening.loop_position import Position, here
from ampscope.capture.step.carried.listening.taken_over import TakenOver
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.calls import call_state
from ampscope.capture.torch_support.calls.function_names import reads_values
from ampscope.capture.torch_support.user_line import NOWHERE, user_place

#: Calls between two steps that are taken down; one that makes more (an evaluation) is not followed to its end.
MOST_CALLS = 256
#: The same where they move weights.
MOST_OF_MOVES = 1024
#: Elements that are copied between two steps before the loop overwrites them, in all.
MOST_COPIED = 1 << 18
#: Functions that overwrite without reading what was there: it need not be known to run them again.
OVERWRITES = frozenset({"__setitem__", "copy_", "fill_", "index_copy_", "scatter_", "masked_fill_", "masked_scatter_"})


class Gap:
    """The calls between two steps.

    Args:
        types: Device types whose autocast state is noted with each call.
        moves: The loop moves weights by these calls.
        weights: Those of the watched models, by ``id``.
    """

    def __init__(self, types: tuple[str, ...], *, moves: bool = False, weights: Container[int] = ()) -> None:
        self.tape = Tape()
        self._weights = weights
        self._leaves: set[int] = set()  # a copied model's own weights, which the loop writes without autograd
        self.tape.outside.moved = self._leaves
        self.positions: list[Position] = []
        self.unknown: set[int] = set()  #: entries that read what they overwrite, of which no copy was kept
        self.names: dict[int, str] = {}  #: of the carried tensors that the calls read, by ``id``
        self.taken_over = 0  #: entries of the step before, which come first
        self._types = types
        self._most = MOST_OF_MOVES if moves else MOST_CALLS
        self._copied = 0
        self._held = HeldAlone()
        self._aliases: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}  # with what they are aliases of

    def begin_with(self, taken: TakenOver, moved: Container[int]) -> None:
        """Takes over what the step before has called last; ``moved`` are the weights that follow, by ``id``."""
        self.tape.entries, self.tape.outside.moved = taken.entries, moved
        self.tape.outside.forget_but(taken.entries)
        self.taken_over = len(taken.entries)
        self.positions += [()] * self.taken_over
        for tensor, source in taken.results:
            self.tape.results.add(tensor, source, written=self.tape[source.entry].in_place)

    def before_write(self, func: Callable[..., Any], args: Any, kwargs: Any) -> dict[int, Tensor]:
        """Copies of what a function is about to overwrite, as far as it reads it and the copies stay small."""
        targets = list(tensor_tree.tensors(kwargs.get("out", args[0] if args else None)))
        size = sum(each.numel() for each in targets)
        is_read = getattr(func, "__name__", "") not in OVERWRITES and self._copied + size <= MOST_COPIED
        self._copied += size * is_read
        originals = self.tape.overwritten_unknown(args, kwargs, is_repeated=is_read)
        if is_read and not torch.is_grad_enabled():
            originals |= {id(each): each.detach().clone() for each in targets if self._is_new_leaf(each)}
        self._held.copied(originals.values())
        return originals

    def _is_new_leaf(self, tensor: Tensor) -> bool:
        """Whether a tensor that needs a gradient, and is no watched weight, is written for the first time."""
        known = id(tensor) in self._weights or id(tensor) in self._leaves
        if known or not (tensor.requires_grad and tensor.is_leaf) or tensor.numel() > SMALL_TARGET:
            return False
        self._leaves.add(id(tensor))
        return self.tape.results.find(tensor) is None

    def called(
        self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any, originals: dict[int, Tensor]
    ) -> Entry | None:
        """Takes a call down; None where it made nothing that could be carried."""
        if next(tensor_tree.tensors((args, kwargs)), None) is None:
            return None
        ambient, place = call_state.current(self._types), user_place() or NOWHERE
        self.tape.function_call(
            func, args, kwargs, result, ambient=ambient, place=place, random=None, originals=originals
        )
        self.positions.append(here())
        entry = self.tape.entries[-1]
        self._held.called(self.tape.entries)
        self._note_alias(func, args, result)
        if entry.in_place:
            self._wrote_through_aliases(tensor_tree.tensors(kwargs.get("out", args[0] if args else None)))
        if entry.in_place and getattr(func, "__name__", "") not in OVERWRITES:
            target = entry.arguments.tensors[0]
            if isinstance(target, OutsideTensor) and target.identity not in originals:
                self.unknown.add(len(self.positions) - 1)
        return entry

    def _note_alias(self, func: Callable[..., Any], args: Any, result: Any) -> None:
        """Remembers whose memory ``x.detach()`` and ``x.data`` give: a loop writes through them and lets go of them."""
        is_alias = getattr(func, "__name__", "") == "detach" or getattr(func, "__self__", None) is torch.Tensor.data
        if is_alias and isinstance(result, Tensor) and args and isinstance(args[0], Tensor):
            self._aliases[id(result)] = weakref.ref(result), weakref.ref(args[0])

    def _wrote_through_aliases(self, targets: Iterable[Tensor]) -> None:
        """Counts what the newest call has written through an alias as written into the tensor that lives on."""
        for leaf, target in enumerate(targets):
            alias, base = self._aliases.get(id(target), (lambda: None, lambda: None))
            owner = base()
            if alias() is target and owner is not None:
                self.tape.results.add(owner, EarlierResult(len(self.positions) - 1, leaf), written=True)

    def results(self) -> Iterator[tuple[Tensor, EarlierResult]]:
        """Yields the tensors that the calls returned or wrote, as far as they are alive."""
        return self.tape.results.alive()

    @property
    def full(self) -> bool:
        """Whether no more calls are taken down."""
        return self.tape.full or len(self.positions) >= self._most or self._held.too_much

    def holds_too_much(self) -> bool:
        """Whether it keeps more alive, of what the loop has let go of, than may be kept through the next step."""
        self._held.look(self.tape.entries)
        return self._held.too_much

    def leading_to(self, ends: Iterable[int]) -> list[int]:
        """The entries that the results of ``ends`` are made of, which are among them, in order."""
        front = list(ends)
        wanted = set(front)
        writers: dict[int, set[int]] = {}
        for number, entry in enumerate(self.tape.entries):
            for result in entry.also_writes:
                writers.setdefault(result.entry, set()).add(number)
        while front:
            number = front.pop()
            read = {result.entry for result in self.tape[number].arguments.earlier} | writers.get(number, set())
            front += read - wanted
            wanted |= read
        return sorted(wanted)

    def reading(self, sources: Iterable[int]) -> set[int]:
        """The entries whose results depend on those of ``sources``, which are among them."""
        return depending(self.tape, sources)

    def made_of(self, is_source: Callable[[Tensor], bool]) -> list[Tensor]:
        """The results that depend on what such tensors hold, those tensors among them."""
        results = list(self.results())
        sources = {source.entry for tensor, source in results if is_source(tensor)}
        for number, entry in enumerate(self.tape.entries):
            if any(is_source(outside.tensor) for outside in entry.arguments.outside):
                sources.add(number)
        derived = self.reading(sources)
        return [tensor for tensor, source in results if source.entry in derived]


def depending(tape: Tape, sources: Iterable[int]) -> set[int]:
    """The entries of a tape whose results depend on those of ``sources``, which are among them."""
    found = set(sources)
    for number, entry in enumerate(tape.entries, tape.start):
        if any(result.entry in found for result in entry.earlier) and reads_values(entry.call):
            found.add(number)
    return found
