"""The step tape: an ordered list of the calls that made a step, with references to their arguments, not copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture.hooks import process_hooks
from ampscope.capture.replay.half_conversions import HALF, dtypes_asked
from ampscope.capture.torch_support import call_state, tensor_tree
from ampscope.capture.torch_support.call_state import Ambient, RandomState
from ampscope.capture.torch_support.function_names import is_in_place
from ampscope.capture.torch_support.torch_private import storage_key
from ampscope.capture.torch_support.user_line import NOWHERE, Place

#: A tape longer than this is given up: a loop that never steps would otherwise keep every batch alive.
MAX_ENTRIES = 20_000

#: Elements up to which a tensor from outside is copied before the loop overwrites it.
SMALL_TARGET = 1 << 20
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
    identity: int  #: ``id`` of the tensor the call was given; ``tensor`` may be a copy of it


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
    scales: bool = False  #: it multiplies a loss with the loss scale
    training: list[bool] = field(default_factory=list)  #: ``training`` of each watched module, at a module's call
    epoch: int = 0  #: which autocast cache it used
    also_writes: list[Result] = field(default_factory=list)  #: earlier results that share the memory it overwrites
    held: list[Held] = field(default_factory=list)  #: the tensors among the arguments

    @property
    def module(self) -> nn.Module:
        """The module that a MODULE entry calls."""
        assert isinstance(self.call, nn.Module)
        return self.call


def fingerprint(value: Any, leaves: int = 4) -> list[Tensor]:
    """A few elements of each of the first floating tensors in ``value``, spread over their extent; no sync."""
    taken = []
    for tensor in tensor_tree.tensors(value):
        if tensor.is_floating_point() and tensor.numel() and tensor.layout is torch.strided:
            spread = tuple(slice(None, None, max(1, size // 4)) for size in tensor.shape)
            taken.append(tensor.detach()[spread].clone())
        if len(taken) == leaves:
            break
    return taken


def produced(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> list[Tensor]:
    """What an in-place call left behind: the tensors it wrote, what they are views of, and what it returned."""
    written = list(tensor_tree.tensors(kwargs.get("out", args[0] if args else None)))
    bases = [tensor._base for tensor in written if tensor._is_view() and tensor._base is not None]
    return [*written, *bases, *tensor_tree.tensors(result)]


class _Known(NamedTuple):
    """A result that is still alive."""

    tensor: weakref.ref[Tensor]
    entry: int
    leaf: int
    version: int  #: of the tensor when the entry had made it


class Tape:
    """The calls of one optimizer step, in order.

    Tensors that an entry returned are known by weak reference, so that the tape keeps alive only what came from
    outside.

    Args:
        device_types: Device types whose autocast state is recorded.
    """

    def __init__(self, device_types: tuple[str, ...]) -> None:
        self.entries: list[Entry] = []
        self.start = 0  #: number of the first entry that is still there
        self.full = False
        self.spoilt = ""  #: why this step cannot be replayed, in words
        self._types = device_types
        self._known: dict[int, _Known] = {}
        self._originals: dict[int, Tensor] = {}
        self._overwriting = False

    @property
    def end(self) -> int:
        """Number that the next entry will get."""
        return self.start + len(self.entries)

    def __getitem__(self, number: int) -> Entry:
        return self.entries[number - self.start]

    def forget_before(self, number: int) -> None:
        """Lets go of the entries before ``number`` and of what they kept alive."""
        del self.entries[: max(0, number - self.start)]
        self.start = max(self.start, number)
        self._known = {key: known for key, known in self._known.items() if known.entry >= self.start}
        self.spoilt = ""

    def forget(self, entry: Entry | None) -> None:
        """Takes back the newest entry, whose call was left by an exception."""
        if entry is not None and self.entries and self.entries[-1] is entry:
            self.entries.pop()

    def module_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place, *, host_random: bool
    ) -> Entry:
        """Opens the entry of a watched module's call; `returned` completes it.

        Args:
            module: The module.
            args: Its arguments.
            kwargs: Its keyword arguments.
            place: The user's line.
            host_random: Whether the call may draw from Python's or NumPy's global generator.
        """
        entry = self._entry(Kind.MODULE, module, args, kwargs, place)
        entry.random = RandomState.take(host=host_random)
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
        originals: dict[int, Tensor],
    ) -> None:
        """Adds a torch function that ran outside the watched modules, after it ran.

        Args:
            func: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            result: What it returned.
            place: The user's line.
            random: The generators' states before it, where it draws.
            originals: What it has overwritten, as it was before (`overwritten_unknown`), by ``id``.
        """
        in_place = is_in_place(func, kwargs)
        self._originals, self._overwriting = originals, in_place
        entry = self._entry(Kind.FUNCTION, func, args, kwargs, place)
        self._originals, self._overwriting = {}, False
        entry.random = random
        entry.in_place = in_place
        self._append(entry)
        if entry.in_place:
            self._learn_written(args, kwargs, result)
        else:
            self._learn(result)

    def overwritten_unknown(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Tensor]:
        """Copies of small tensors from outside that an in-place function is about to overwrite, by ``id``."""
        targets = tensor_tree.tensors(kwargs.get("out", args[0] if args else None))
        return {
            id(tensor): tensor.detach().clone()
            for tensor in targets
            if id(tensor) not in self._known and not tensor.requires_grad and tensor.numel() <= SMALL_TARGET
        }

    def backward_call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """Adds a backward, before it runs."""
        entry = self._entry(Kind.BACKWARD, call, args, kwargs, NOWHERE)
        entry.fingerprint = [loss.detach().clone() for loss in backward_roots(args, kwargs)]
        return self._append(entry)

    def returned(self, entry: Entry, result: Any) -> None:
        """Completes the entry of a module's call with what it returned."""
        entry.fingerprint = fingerprint(result)
        self._learn(result)

    def mark_scaled(self, outputs: list[Tensor]) -> None:
        """Notes that the entries which made ``outputs`` multiply with the loss scale."""
        for tensor in outputs:
            known = self._known.get(id(tensor))
            if known is not None and known.tensor() is tensor and known.entry >= self.start:
                self[known.entry].scales = True

    def needed(self, since: int) -> list[int]:
        """Numbers of the entries that make the step which begins at ``since``.

        These are its backward passes, its differentiable module calls (they may change buffers), and whatever those
        depend on, before ``since`` too.
        """
        rewritten: dict[int, list[int]] = {}  # entry -> the in-place entries that change its results later
        front = []
        for number, entry in enumerate(self.entries, self.start):
            if number >= since and (entry.kind is Kind.BACKWARD or _trains(entry)):
                front.append(number)
            for result in entry.also_writes:
                rewritten.setdefault(result.entry, []).append(number)
        wanted = set(front)
        while front:
            number = front.pop()
            needs = [item.entry for item in self[number].held if isinstance(item, Result)]
            for other in (*needs, *rewritten.get(number, ())):
                if other not in wanted and other >= self.start:
                    wanted.add(other)
                    front.append(other)
        return sorted(wanted)

    def clear(self) -> None:
        """Forgets everything and lets go of what came from outside."""
        self.start = self.end
        self.entries.clear()
        self._known.clear()
        self.full = False
        self.spoilt = ""

    def _entry(self, kind: Kind, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place) -> Entry:
        held: list[Held] = []

        def hold(tensor: Tensor) -> Held:
            held.append(self._hold(tensor))
            return held[-1]

        packed, named = tensor_tree.rebuild((args, kwargs), hold)
        now = call_state.current(self._types)
        return Entry(kind, call, packed, named, now, place, epoch=process_hooks.autocast_epoch(), held=held)

    def _append(self, entry: Entry) -> Entry:
        if len(self.entries) >= MAX_ENTRIES:
            self.clear()
            self.full = True
        if not self.full:
            self.entries.append(entry)
        return entry

    def _hold(self, tensor: Tensor) -> Held:
        known = self._known.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            # a custom autograd function computes without grad and gives its result a history then
            inside_function = tensor.requires_grad and not self[known.entry].ambient.grad
            rewritten = not self._overwriting and not tensor.requires_grad and version(tensor) != known.version
            if not inside_function and not rewritten:
                return Result(known.entry, known.leaf)
        kept = self._originals.get(id(tensor), tensor)
        if kept is tensor and not tensor.dim() and not tensor.requires_grad and tensor.layout is torch.strided:
            kept = tensor.clone()  # a number such as the loss scale: kept by value, for whoever writes into it next
        return Outside(kept, version(kept), id(tensor))

    def _learn(self, value: Any) -> None:
        """Remembers the tensors of ``value`` as results of the newest entry."""
        if self.full or not self.entries:
            return
        index = self.end - 1
        for leaf, tensor in enumerate(tensor_tree.tensors(value)):
            if self.entries[-1].in_place or not self._handed_back(tensor):
                self._known[id(tensor)] = _Known(weakref.ref(tensor), index, leaf, version(tensor))

    def _handed_back(self, tensor: Tensor) -> bool:
        """Whether the newest entry merely returned one of its arguments (``x.to(x.device)``).

        One that asks for a half dtype by name returns another tensor as soon as its argument is none.
        """
        newest = self.entries[-1]
        if HALF & dtypes_asked(newest.call, newest.args, newest.kwargs):
            return False
        known = self._known.get(id(tensor))
        place = (known.entry, known.leaf) if known is not None and known.tensor() is tensor else None
        return any(
            item.identity == id(tensor) if isinstance(item, Outside) else place == (item.entry, item.leaf)
            for item in newest.held
            if isinstance(item, (Outside, Result))
        )

    def _learn_written(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Remembers what an in-place call left, and makes results that share its memory depend on it."""
        if self.full or not self.entries:
            return
        left = produced(args, kwargs, result)
        entry, written = self.entries[-1], {storage_key(tensor) for tensor in left if _dense(tensor)}
        entry.also_writes = [
            Result(known.entry, known.leaf)
            for known in self._known.values()
            if (other := known.tensor()) is not None and _dense(other) and storage_key(other) in written
        ]
        self._learn(left)


def _dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def backward_roots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What ``torch.autograd.backward`` was called on."""
    return list(tensor_tree.tensors(args[0] if args else kwargs.get("tensors")))


def creates_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a backward was asked to be differentiable itself (its fourth argument)."""
    return bool(args[3] if len(args) > 3 else kwargs.get("create_graph"))


def version(tensor: Tensor) -> int:
    """The counter of in-place changes; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


def draws_by_name(name: str) -> bool:
    """Whether a torch function of this name draws random numbers."""
    return any(word in name for word in _RANDOM)


def _trains(entry: Entry) -> bool:
    return entry.kind is Kind.MODULE and entry.ambient.grad
