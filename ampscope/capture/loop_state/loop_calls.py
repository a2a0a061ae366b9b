"""A gap is what a loop called between two steps: a tape that can be played, with the line of each call."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ampscope.capture.tape.call_tape import Tape
from ampscope.capture.tape.live_results import SMALL_TARGET
from ampscope.capture.tape.tape_entry import (
    Arguments,
    EarlierResult,
    Entry,
    EntryKind,
    GradientOf,
    OutsideTensor,
    TensorReference,
)
from ampscope.capture.tape.taped_step import gives_gradients
from ampscope.capture.torch_support import call_state, tensor_tree
from ampscope.capture.torch_support.function_names import reads_values, targets
from ampscope.capture.torch_support.torch_private import version_counter
from ampscope.capture.torch_support.user_line import NOWHERE, user_place
from ampscope.capture.tracing.light_statistics import stored
from ampscope.capture.tracing.sites import dtype_name

#: Bytes of what calls between two steps have read and the loop has let go of that are kept alive.
MOST_HELD = 1 << 26
#: All calls are gone through again when they have read one part in so many more than at the last time.
_PART = 8


class HeldAlone:
    """Watches how much of what calls read is kept alive by them alone.

    Who else refers to a tensor is known from its reference count, which is looked at only where calls have read much.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()  # tensors, by ``id``
        self._bytes = 0  # of them, whoever keeps them alive
        self._enough = MOST_HELD  # bytes at which the calls are gone through
        self.too_much = False  #: it was more than is kept

    def copied(self, copies: Iterable[Tensor]) -> None:
        """The calls refer to copies."""
        self._bytes += sum(each.nbytes for each in copies)

    def called(self, entries: list[Entry]) -> None:
        """A call has been added to ``entries``."""
        for reference in entries[-1].arguments.outside:
            if id(reference.tensor) not in self._seen:
                self._seen.add(id(reference.tensor))
                self._bytes += stored(reference.tensor).nbytes
        if self._bytes > self._enough:
            held = self.look(entries)
            self._enough = self._bytes + max(MOST_HELD - held, self._bytes // _PART)

    def look(self, entries: list[Entry]) -> int:
        """The bytes that ``entries`` keep alive alone, where they have read enough for that to be too much."""
        held = held_alone(entries) if self._bytes > MOST_HELD else 0
        self.too_much = self.too_much or held > MOST_HELD
        return held


def held_alone(entries: Iterable[Entry]) -> int:
    """Bytes of what ``entries`` read from outside to which nothing else refers."""
    references = {id(each): each for entry in entries for each in entry.arguments.outside}
    holders: dict[int, list[OutsideTensor]] = {}
    for each in references.values():
        holders.setdefault(id(each.tensor), []).append(each)
    return sum(
        stored(first.tensor).nbytes
        for first, *others in holders.values()
        if _references(first) <= _BY_ONE + len(others)
    )


def _references(holder: OutsideTensor) -> int:
    """References to the tensor of ``holder``, and those that asking takes."""
    return sys.getrefcount(holder.tensor)


_BY_ONE = _references(OutsideTensor(cast(Tensor, object()), 0, 0))


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
            found = _as_it_is_now(reference, alive, gradients)
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


def _as_it_is_now(
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


Position = tuple[tuple[CodeType, int], ...]


def position_here() -> Position:
    """Every frame that leads here, the outermost first, with its line."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(frames[::-1])


def is_above(one: Position, other: Position) -> bool:
    """Whether ``one`` stands above ``other`` in the innermost frame that both have in common; undecided counts so."""
    for (code, line), (other_code, other_line) in zip(one, other, strict=False):
        if code is not other_code:
            return True
        if line != other_line:
            return line < other_line
    return True


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
        self.dtypes: list[str] = []  #: of what each call returned first, of floating-point numbers; empty for others
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
        self.dtypes += [""] * self.taken_over
        for tensor, source in taken.results:
            self.tape.results.add(tensor, source, written=self.tape[source.entry].in_place)

    def before_write(self, func: Callable[..., Any], args: Any, kwargs: Any) -> dict[int, Tensor]:
        """Copies of what a function is about to overwrite, as far as it reads it and the copies stay small."""
        written = targets(args, kwargs)
        size = sum(each.numel() for each in written)
        is_read = getattr(func, "__name__", "") not in OVERWRITES and self._copied + size <= MOST_COPIED
        self._copied += size * is_read
        originals = self.tape.overwritten_unknown(args, kwargs, is_repeated=is_read)
        if is_read and not torch.is_grad_enabled():
            originals |= {id(each): each.detach().clone() for each in written if self._is_new_leaf(each)}
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
        ambient, place = call_state.ambient_now(self._types), user_place() or NOWHERE
        self.tape.function_call(
            func, args, kwargs, result, ambient=ambient, place=place, random=None, originals=originals
        )
        self.positions.append(position_here())
        first = next(tensor_tree.tensors(result), None)
        self.dtypes.append(dtype_name(first.dtype) if first is not None and first.is_floating_point() else "")
        entry = self.tape.entries[-1]
        self._held.called(self.tape.entries)
        self._note_alias(func, args, result)
        if entry.in_place:
            self._wrote_through_aliases(targets(args, kwargs))
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
