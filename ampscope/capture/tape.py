"""The step tape: an ordered list of the calls that made a step, with references to their arguments, not copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture import ambient, containers
from ampscope.capture.ambient import Ambient, RandomState
from ampscope.capture.frames import NOWHERE, Place

#: A tape longer than this is given up: a loop that never steps would otherwise keep every batch alive.
MAX_ENTRIES = 20_000

_RANDOM = ("rand", "dropout", "bernoulli", "normal_", "uniform_", "multinomial", "exponential_", "gumbel", "rrelu")


class Kind(Enum):
    """What an entry calls."""

    MODULE = auto()
    FUNCTION = auto()
    BACKWARD = auto()


class Held:
    """Stands for a tensor among an entry's arguments."""

    __slots__ = ()


@dataclass(slots=True)
class Result(Held):
    """A tensor that an earlier entry returned."""

    entry: int
    leaf: int


@dataclass(slots=True)
class Outside(Held):
    """A tensor that came from outside the tape: a batch, a target, a parameter used in the loss."""

    tensor: Tensor
    version: int
    place: str = ""


@dataclass(slots=True)
class Entry:
    """One call."""

    kind: Kind
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ambient: Ambient
    place: Place
    random: RandomState | None = None
    versions: list[int] = field(default_factory=list)
    fingerprint: list[Tensor] = field(default_factory=list)
    in_place: bool = False
    also_writes: list[Result] = field(default_factory=list)  #: earlier results that share the memory it overwrites

    def held(self) -> Iterator[Held]:
        """The tensors among the arguments."""
        found: list[Held] = []
        containers.rebuild((self.args, self.kwargs), found.append, Held)
        return iter(found)


def fingerprint(value: Any, leaves: int = 4) -> list[Tensor]:
    """A few elements of each of the first floating tensors in ``value``, spread over their extent; no sync."""
    taken = []
    for tensor in containers.tensors(value):
        if tensor.is_floating_point() and tensor.numel() and tensor.layout is torch.strided:
            spread = tuple(slice(None, None, max(1, size // 4)) for size in tensor.shape)
            taken.append(tensor.detach()[spread].clone())
        if len(taken) == leaves:
            break
    return taken


def is_in_place(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a torch function overwrites its first argument (or ``out=``), judged by torch's naming convention."""
    name = getattr(func, "__name__", "")
    if "out" in kwargs:
        return True
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (
            name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
        )
    return name.endswith("_")


def produced(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> list[Tensor]:
    """What an in-place call left behind: the tensors it wrote, what they are views of, and what it returned."""
    written = list(containers.tensors(kwargs.get("out", args[0] if args else None)))
    bases = [tensor._base for tensor in written if tensor._is_view() and tensor._base is not None]
    return [*written, *bases, *containers.tensors(result)]


class Tape:
    """The calls of one optimizer step, in order.

    Tensors that an entry returned are known by weak reference, so that the tape keeps alive only what came from
    outside.

    Args:
        device_types: Device types whose autocast state is recorded.
    """

    def __init__(self, device_types: tuple[str, ...]) -> None:
        self.entries: list[Entry] = []
        self.full = False
        self.spoilt = ""  #: why this step cannot be replayed, in words
        self._types = device_types
        self._known: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def module_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> Entry:
        """Opens the entry of a watched module's call; `returned` completes it."""
        entry = self._entry(Kind.MODULE, module, args, kwargs, place)
        entry.random = RandomState.take()
        return self._append(entry)

    def function_call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        *,
        place: Place,
        random: RandomState | None,
    ) -> None:
        """Adds a torch function that ran outside the watched modules, after it ran."""
        entry = self._entry(Kind.FUNCTION, func, args, kwargs, place)
        entry.random = random
        entry.in_place = is_in_place(func, kwargs)
        self._append(entry)
        if entry.in_place:
            self._learn_written(args, kwargs, result)
        else:
            self._learn(result)

    def backward_call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """Adds a backward, before it runs."""
        entry = self._entry(Kind.BACKWARD, call, args, kwargs, NOWHERE)
        entry.fingerprint = [loss.detach().clone() for loss in backward_roots(args, kwargs)]
        return self._append(entry)

    def returned(self, entry: Entry, result: Any) -> None:
        """Completes the entry of a module's call with what it returned."""
        entry.fingerprint = fingerprint(result)
        self._learn(result)

    def needed(self, since: int = 0) -> list[int]:
        """Positions of the entries that make the step which begins at ``since``.

        These are its backward passes, its differentiable module calls (they may change buffers), and whatever those
        depend on, before ``since`` too.
        """
        steps = enumerate(self.entries[since:], since)
        front = [i for i, entry in steps if entry.kind is Kind.BACKWARD or _trains(entry)]
        rewritten: dict[int, list[int]] = {}  # entry -> the in-place entries that change its results later
        for index, entry in enumerate(self.entries):
            for result in entry.also_writes:
                rewritten.setdefault(result.entry, []).append(index)
        wanted = set(front)
        while front:
            index = front.pop()
            needs = [item.entry for item in self.entries[index].held() if isinstance(item, Result)]
            for other in (*needs, *rewritten.get(index, ())):
                if other not in wanted:
                    wanted.add(other)
                    front.append(other)
        return sorted(wanted)

    def clear(self) -> None:
        """Forgets everything and lets go of what came from outside."""
        self.entries.clear()
        self._known.clear()
        self.full = False
        self.spoilt = ""

    def _entry(self, kind: Kind, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> Entry:
        packed = containers.rebuild(args, self._hold)
        return Entry(kind, call, packed, containers.rebuild(kwargs, self._hold), ambient.current(self._types), place)

    def _append(self, entry: Entry) -> Entry:
        if len(self.entries) >= MAX_ENTRIES:
            self.clear()
            self.full = True
        if not self.full:
            self.entries.append(entry)
        return entry

    def _hold(self, tensor: Tensor) -> Held:
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            inside_function = tensor.requires_grad and not self.entries[known[1]].ambient.grad
            if not inside_function:  # else what a custom autograd function computed and then gave a history
                return Result(known[1], known[2])
        return Outside(tensor, version(tensor))

    def _learn(self, value: Any) -> None:
        """Remembers the tensors of ``value`` as results of the newest entry."""
        if self.full:
            return
        index = len(self.entries) - 1
        for leaf, tensor in enumerate(containers.tensors(value)):
            if not _handed_back(tensor, self.entries[index]):
                self._known[id(tensor)] = (weakref.ref(tensor), index, leaf)

    def _learn_written(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Remembers what an in-place call left, and makes results that share its memory depend on it."""
        if self.full:
            return
        left = produced(args, kwargs, result)
        entry, written = self.entries[-1], {tensor.untyped_storage().data_ptr() for tensor in left if _dense(tensor)}
        entry.also_writes = [
            Result(index, leaf)
            for ref, index, leaf in self._known.values()
            if (other := ref()) is not None and _dense(other) and other.untyped_storage().data_ptr() in written
        ]
        self._learn(left)


def _dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def backward_roots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What ``torch.autograd.backward`` was called on."""
    return list(containers.tensors(args[0] if args else kwargs.get("tensors")))


def creates_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a backward was asked to be differentiable itself (its fourth argument)."""
    return bool(args[3] if len(args) > 3 else kwargs.get("create_graph"))


def _handed_back(tensor: Tensor, entry: Entry) -> bool:
    """Whether an entry merely returned a tensor from outside (``x.to(x.device)``)."""
    if entry.in_place:
        return False
    return any(isinstance(item, Outside) and item.tensor is tensor for item in entry.held())


def version(tensor: Tensor) -> int:
    """The counter of in-place changes; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


def draws_by_name(name: str) -> bool:
    """Whether a torch function of this name draws random numbers."""
    return any(word in name for word in _RANDOM)


def _trains(entry: Entry) -> bool:
    return entry.kind is Kind.MODULE and entry.ambient.grad
