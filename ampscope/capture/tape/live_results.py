"""The tape knows by weak reference which results of its calls live, and keeps what they read from outside."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture.tape.tape_entry import EarlierResult, Entry, GradientOf, OutsideTensor
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.function_names import gives_to_python, targets
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.torch_private import past_modes, storage_key, version_counter

#: Elements up to which a tensor from outside is copied before the loop overwrites it.
SMALL_TARGET = 1 << 20
_PLAIN = (Tensor, nn.Parameter)


class OutsideTensors:
    """The tensors from outside that a tape refers to, by the memory they live in.

    Attributes:
        moved: Leaves that the calls write by themselves, by ``id``.
    """

    def __init__(self) -> None:
        self.moved: Container[int] = ()
        self._by_memory: dict[int, list[OutsideTensor]] = {}

    def refer(self, tensor: Tensor, original: Tensor | None) -> OutsideTensor:
        """A reference to a tensor that no entry made.

        Args:
            tensor: What a call was given.
            original: A copy of it as it was before the call overwrote it; None where it does not.
        """
        identity = id(tensor)
        if original is not None:
            return OutsideTensor(original, version_counter(original), identity)
        if tensor.requires_grad:  # weights, mostly: autograd would not let the loop write into them unseen
            return OutsideTensor(tensor, version_counter(tensor), identity)
        if not tensor.dim() and tensor.layout is torch.strided:
            tensor = tensor.clone()  # a number such as the loss scale: kept by value, for whoever writes into it next
            return OutsideTensor(tensor, version_counter(tensor), identity)
        reference = OutsideTensor(tensor, version_counter(tensor), identity)
        if _is_plain(tensor):
            self._by_memory.setdefault(storage_key(tensor), []).append(reference)
        return reference

    def copied_before_write(self, targets: Iterable[Tensor], unknown: Callable[[Tensor], bool]) -> dict[int, Tensor]:
        """Copies of small tensors from outside that are about to be overwritten, by ``id``.

        What earlier calls have read of the same memory refers to copies from now on: a replay reads there what they
        read. One copy for each tensor, so that what shared memory in the step shares it in a replay.

        Args:
            targets: The tensors that a function is about to write.
            unknown: Whether no entry has made or written a tensor, and it is to be copied therefore.
        """
        copies: dict[int, Tensor] = {}
        for tensor in targets:
            if not tensor.requires_grad and tensor.numel() <= SMALL_TARGET and unknown(tensor):
                copies[id(tensor)] = tensor.detach().clone()
            if self._by_memory and _is_plain(tensor):
                for reference in self._by_memory.pop(storage_key(tensor), ()):
                    _keep(reference, copies)
        return copies

    def forget_but(self, entries: Iterable[Entry]) -> None:
        """Forgets all references but those of ``entries``."""
        self._by_memory.clear()
        for entry in entries:
            for reference in entry.arguments.outside:
                if id(reference.tensor) == reference.identity and _is_plain(reference.tensor):
                    self._by_memory.setdefault(storage_key(reference.tensor), []).append(reference)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor lives in memory of its own kind, and autograd would not let the loop write into it unseen."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.requires_grad


def _keep(reference: OutsideTensor, copies: dict[int, Tensor]) -> None:
    """Lets a reference to what is about to be overwritten refer to a copy, which may be among ``copies``."""
    read = reference.tensor
    if version_counter(read) != reference.version or read.numel() > SMALL_TARGET:
        return
    kept = copies.get(reference.identity)
    if kept is None:
        kept = copies[reference.identity] = read.detach().clone()
    reference.tensor, reference.version = kept, version_counter(kept)


#: Elements that are copied after a backward, before the loop overwrites them, in all.
MOST_COPIED = 1 << 18
#: Single values that are kept, the latest.
MOST_SCALARS = 64


class LiveResult(NamedTuple):
    """A tensor that an entry returned."""

    tensor: weakref.ref[Tensor]
    source: EarlierResult
    version: int  #: of the tensor when the entry had made it
    is_history: bool  #: it is small, has no history in autograd's sense, and the entry has written into it

    @property
    def was_written(self) -> bool:
        """Whether it was changed in place since."""
        tensor = self.tensor()
        return tensor is not None and version_counter(tensor) != self.version


class Scalar(NamedTuple):
    """A single differentiable value that an entry returned, such as a loss."""

    value: Tensor  #: without its history
    source: EarlierResult


class LiveResults:
    """The results of the entries on a tape, by the tensor.

    Attributes:
        by_id: What entries returned, by ``id``; whether the tensor is that one still, `find` asks.
        scalars: The latest values that a backward could begin from, alive or not, the newest last.
        given_to_python: Numbers that the loop has read on the host: the entry that comes next, and the one that made
            them; None where no entry did.
    """

    def __init__(self) -> None:
        self.given_to_python: list[tuple[int, int | None]] = []
        self.by_id: dict[int, LiveResult] = {}
        self._in_storage: dict[int, dict[int, None]] = {}  # keys of `by_id`, for calls that write in place
        self._unsorted: list[int] = []  # those that are not in there yet
        self.scalars: deque[Scalar] = deque(maxlen=MOST_SCALARS)

    def add(self, tensor: Tensor, source: EarlierResult, *, written: bool = False) -> None:
        """An entry has returned ``tensor``, or, if ``written``, has overwritten it."""
        trains = tensor.requires_grad
        is_history = written and not trains and tensor.numel() <= SMALL_TARGET
        version = -1 if tensor.is_inference() else tensor._version
        self.by_id[id(tensor)] = tuple.__new__(LiveResult, (weakref.ref(tensor), source, version, is_history))
        self._unsorted.append(id(tensor))
        if trains and tensor.numel() == 1 and _owns_its_memory(tensor):
            past_dispatch, past_functions = past_modes([tensor])
            with past_dispatch, past_functions:  # no op of the loop's, which modes of the user's may count
                self.scalars.append(Scalar(tensor.detach(), source))

    def find(self, tensor: Tensor) -> LiveResult | None:
        """Returns what is known of ``tensor``; None where no entry returned it."""
        known = self.by_id.get(id(tensor))
        return known if known is not None and known.tensor() is tensor else None

    def note_read(self, func: Callable[..., Any], tensor: Any, at: int) -> None:
        """A function has told of a tensor, before entry ``at``; if its numbers, the loop may decide by them."""
        if not gives_to_python(func):
            return
        known = self.find(tensor) if isinstance(tensor, Tensor) else None
        self.given_to_python.append((at, known.source.entry if known is not None else None))

    def forget_written(self) -> None:
        """Forgets what was written in place and is small enough to be copied: from now on it comes from outside."""
        if self.by_id:
            self._forget_all_but({key: known for key, known in self.by_id.items() if not known.is_history})

    def let_go_of_values(self) -> None:
        """Forgets what has no history of its own: from now on it comes from outside, whoever has made it."""
        alive = ((key, known, known.tensor()) for key, known in self.by_id.items())
        self._forget_all_but(
            {key: known for key, known, each in alive if each is not None and each.grad_fn is not None}
        )

    def assigned(self, models: Models, since: int) -> dict[str, EarlierResult]:
        """The gradients of parameters that entries from ``since`` on have made, by the parameter's name."""
        found = {}
        for name, parameter in models.parameters.values():
            known = self.find(parameter.grad) if parameter.grad is not None else None
            if known is not None and known.source.entry >= since:
                found[name] = known.source
        return found

    def alive(self) -> Iterator[tuple[Tensor, EarlierResult]]:
        """Yields the tensors that are still alive, each with the result that it is."""
        for known in self.by_id.values():
            tensor = known.tensor()
            if tensor is not None:
                yield tensor, known.source

    def sharing_memory(self, tensors: Iterable[Tensor]) -> list[EarlierResult]:
        """The results that live in the memory of any of ``tensors``."""
        found = []
        self._index()
        for storage in {storage_key(tensor) for tensor in tensors if _has_memory(tensor)}:
            for known in map(self.by_id.get, self._in_storage.get(storage, ())):
                other = known.tensor() if known is not None else None
                if known is not None and other is not None and _has_memory(other) and storage_key(other) == storage:
                    found.append(known.source)
        return found

    def _index(self) -> None:
        """Sorts the results that came since it was asked last by the memory they live in."""
        for key in dict.fromkeys(self._unsorted):
            known = self.by_id.get(key)
            tensor = known.tensor() if known is not None else None
            if tensor is not None and _has_memory(tensor):
                self._in_storage.setdefault(storage_key(tensor), {})[key] = None
        self._unsorted.clear()

    def _forget_all_but(self, known: dict[int, LiveResult]) -> None:
        self.by_id = known
        self._unsorted = list(known)
        self._in_storage.clear()

    def forget_before(self, number: int) -> None:
        """Forgets the results of the entries before ``number``."""
        if self.given_to_python:
            self.given_to_python = [read for read in self.given_to_python if read[0] >= number]
        self._forget_all_but({key: known for key, known in self.by_id.items() if known.source.entry >= number})
        while self.scalars and self.scalars[0].source.entry < number:
            self.scalars.popleft()

    def clear(self) -> None:
        """Forgets all."""
        self._forget_all_but({})
        self.given_to_python.clear()
        self.scalars.clear()


class LeftGradients:
    """The gradients that the latest backward of the step has left, for the loop to change."""

    def __init__(self) -> None:
        self._models: Models | None = None
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] | None = None  # id -> gradient, id of its parameter
        self._copied = MOST_COPIED  # elements that may still be

    def left_by_backward(self, models: Models) -> None:
        """A backward has ended; which tensors it has left is looked up when the first of them is asked for."""
        self._models, self._known, self._copied = models, None, MOST_COPIED

    def find(self, tensor: Tensor) -> GradientOf | None:
        """Finds the parameter whose gradient a tensor is; None for any other."""
        if self._models is None:
            return None
        known = self._look().get(id(tensor))
        return GradientOf(known[1]) if known is not None and known[0]() is tensor else None

    def holds(self, value: Any) -> bool:
        """Whether a value is one of them, or a list that begins with one."""
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        return id(first) in self._look()

    def _look(self) -> dict[int, tuple[weakref.ref[Tensor], int]]:
        """Looks up which they are, before the loop puts others in their place."""
        if self._known is None and self._models is not None:
            pairs = [(key, parameter.grad) for key, (_, parameter) in self._models.parameters.items()]
            self._known = {id(grad): (weakref.ref(grad), key) for key, grad in pairs if grad is not None}
        return self._known or {}

    def may_copy(self, tensor: Tensor) -> bool:
        """Whether what the loop overwrites after backward is kept as it was: no gradient, and not too much."""
        if self._models is None or tensor.numel() > self._copied or self.find(tensor) is not None:
            return False
        self._copied -= tensor.numel()
        return True

    def forget(self) -> None:
        """Forgets them."""
        self._models = self._known = None


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def _owns_its_memory(tensor: Tensor) -> bool:
    """Whether keeping ``tensor`` keeps no more than its own few bytes."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor._is_view()


def in_place_results(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> list[Tensor]:
    """Returns what an in-place call left behind: the tensors it wrote, what they are views of, and what it returned."""
    written = targets(args, kwargs)
    bases = [tensor._base for tensor in written if tensor._is_view() and tensor._base is not None]
    return [*written, *bases, *tensor_tree.tensors(result)]
