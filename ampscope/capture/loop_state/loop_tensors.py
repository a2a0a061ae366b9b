"""A loop carries tensors from step to step: known by memory or line, finite, or bad since a write of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from enum import IntEnum
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampscope.capture.loop_state.held_state import HeldTensor
from ampscope.capture.loop_state.loop_calls import OVERWRITES, depending
from ampscope.capture.tape.call_tape import Tape
from ampscope.capture.tape.tape_entry import Entry
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.function_names import reads_values
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.torch_private import storage_key, storage_ref
from ampscope.capture.tracing import light_statistics
from ampscope.trace.schema import StateKind

#: Results that are remembered while they are alive, to see which of them a later round reads.
MOST_MADE = 1024
#: Rounds of either kind, two for a step, after which the loop keeps what is still alive: longer than the tape does.
KEPT_ROUNDS = 8
_PLAIN = (Tensor, nn.Parameter)


class Role(NamedTuple):
    """The line and the function that made a result; results of two rounds with the same role are the same thing."""

    code: CodeType | None
    line: int
    call: Callable[..., Any]
    leaf: int


def role_of(entry: Entry, leaf: int) -> Role:
    """The role of a result of an entry."""
    return Role(entry.place.code, entry.place.line, entry.call, leaf)


class Round(IntEnum):
    """The places where a loop's calls run; what one round of a kind made and the next of that kind reads is carried."""

    GAP = 0  #: between two steps
    STEP = 1


class _Made(NamedTuple):
    """A tensor that a call has made, known weakly."""

    tensor: weakref.ref[Tensor]
    role: Role
    round: int  #: in which it was made, of all of either kind


class Carried:
    """The tensors that a loop carries; keeps none of them alive.

    Args:
        buffer_name: The qualified name of a buffer of the watched models; empty for any other tensor.
    """

    def __init__(self, buffer_name: Callable[[Tensor], str]) -> None:
        self._buffer_name = buffer_name
        self._memories: dict[int, tuple[Any, str]] = {}  # storage -> what keeps the key, name
        self._names: dict[Role, str] = {}
        self._roles: set[Role] = set()  # of which a later round has read what they made, or the loop keeps it
        self._made: tuple[dict[int, _Made], ...] = ({}, {})  # in earlier rounds of each kind
        self._making: tuple[dict[int, _Made], ...] = ({}, {})  # in the present one
        self._written: dict[int, Any] = {}  # storages written in earlier rounds -> what keeps the key
        self._writing: dict[int, Any] = {}
        self._round = 0
        self._named = 0

    def __bool__(self) -> bool:
        return bool(self._memories or self._roles)

    def round_ended(self, kind: Round) -> None:
        """Ends a round: what was made until now counts from now on as made in an earlier one."""
        self._round += 1
        made, making = self._made[kind], self._making[kind]
        kept = {key: each for key, each in made.items() if each.tensor() is not None} | making
        made.clear()
        made.update(list(kept.items())[-MOST_MADE:])
        making.clear()
        if kind is Round.GAP:  # made between steps and still there: a store that is read much later, perhaps
            self._roles.update(each.role for each in made.values() if self._is_old(each))
        self._written.update(self._writing)
        self._writing.clear()
        self._memories = {key: known for key, known in self._memories.items() if not known[0].expired()}
        self._written = {key: kept for key, kept in self._written.items() if not kept.expired()}

    def made(self, kind: Round, tensor: Tensor, role: Role) -> None:
        """A call has made a tensor."""
        if len(self._making[kind]) < MOST_MADE:
            self._making[kind][id(tensor)] = _Made(weakref.ref(tensor), role, self._round)

    def _is_old(self, made: _Made) -> bool:
        return self._round - made.round >= KEPT_ROUNDS

    def read(self, kind: Round, tensor: Tensor) -> None:
        """A call reads a tensor; what an earlier round made is carried, and so is what its line makes from now on.

        What the step makes for the code after it, and that for the next step, is not.
        """
        known = self._made[kind].get(id(tensor))
        if known is None:
            other = self._made[1 - kind].get(id(tensor))
            known = other if other is not None and self._is_old(other) else None
        if known is not None and known.tensor() is tensor:
            self._roles.add(known.role)

    def wrote(self, tensor: Tensor) -> None:
        """A call has written into a tensor; memory that an earlier round wrote, too, is carried."""
        if not has_memory(tensor):
            return
        key = storage_key(tensor)
        if key in self._written and key not in self._memories:
            self._memories[key] = self._written[key], self._buffer_name(tensor) or self._new_name()
        elif key not in self._writing:
            self._writing[key] = storage_ref(tensor)

    def name(self, tensor: Tensor) -> str:
        """Returns the name of a carried tensor; empty for any other."""
        return self._name_of_memory(tensor) or self.name_by_id(id(tensor))

    def called(self, tensor: Tensor) -> str:
        """Returns the name of any tensor that a line has made, whether it is known to be carried or not."""
        made = self._made_as(id(tensor))
        return self._name_of_memory(tensor) or (self._role_name(made.role) if made is not None else "")

    def name_by_id(self, identity: int) -> str:
        """Returns the name of a carried tensor that is alive, by its ``id``, where the line that made it tells."""
        made = self._made_as(identity)
        return self._role_name(made.role) if made is not None and made.role in self._roles else ""

    def _name_of_memory(self, tensor: Tensor) -> str:
        known = self._memories.get(storage_key(tensor)) if has_memory(tensor) else None
        return known[1] if known is not None else ""

    def _made_as(self, identity: int) -> _Made | None:
        for made in (*self._making, *self._made):
            held = made.get(identity)
            if held is not None and held.tensor() is not None:
                return held
        return None

    def _role_name(self, role: Role) -> str:
        return self._names.get(role) or self._names.setdefault(role, self._new_name())

    def _new_name(self) -> str:
        self._named += 1
        return f"carried tensor {self._named}"


class Averages:
    """The tensors that a loop keeps of the watched weights and buffers, and writes in place: averages, teachers.

    Keeps none of them alive, and learns which there are from the calls between a few steps.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._known: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._count = 0

    @property
    def weights(self) -> Container[int]:
        """The watched models' weights, by ``id``: averages are made of them."""
        return self._models.parameters

    def learn(self, tape: Tape) -> None:
        """Looks for averages among what the calls on a tape have written: each has the shape of what it is made of."""
        self._known = {key: known for key, known in self._known.items() if known[0]() is not None}
        names = {key: name for key, (name, _) in self._models.parameters.items()}
        names |= {id(each): ".".join(filter(None, (module, name))) for module, name, each in self._models.buffers()}
        gradients = {id(parameter.grad) for _, parameter in self._models.parameters.values()}
        made_of: dict[int, dict[torch.Size, set[str]]] = {}
        for number, entry in enumerate(tape.entries, tape.start):
            here = made_of[number] = {}
            for outside in entry.arguments.outside:
                if outside.identity in names:
                    here.setdefault(outside.tensor.shape, set()).add(names[outside.identity])
            for result in entry.earlier:
                for shape, which in made_of.get(result.entry, {}).items():
                    here.setdefault(shape, set()).update(which)
        for tensor, source in list(tape.results.alive()):
            which = made_of[source.entry].get(tensor.shape, set()) if tape[source.entry].in_place else set()
            is_other = id(tensor) not in names and id(tensor) not in gradients and _stands_alone(tensor)
            if which and is_other and tensor.layout is torch.strided and id(tensor) not in self._known:
                self._count += 1
                of = f" of {which.pop()}" if len(which) == 1 else ""
                self._known[id(tensor)] = weakref.ref(tensor), f"average {self._count}{of}"

    def held(self) -> Iterator[HeldTensor]:
        """Yields the averages that are alive, and have values that can be looked at."""
        for reference, name in list(self._known.values()):
            tensor = reference()
            if tensor is not None and light_statistics.may_turn_bad(tensor) and tensor.untyped_storage().nbytes():
                yield HeldTensor(StateKind.CARRIED, name, "", tensor.detach())


def buffer_name(models: Models, tensor: Tensor) -> str:
    """The qualified name of a buffer of the models; empty for any other tensor."""
    buffers = models.buffers()
    return next((".".join(filter(None, (module, name))) for module, name, each in buffers if each is tensor), "")


def _stands_alone(tensor: Tensor) -> bool:
    """Whether a tensor is no part of another one (whose autograd must not be asked) and no result with a history."""
    return not tensor._is_view() and tensor.grad_fn is None


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor lives in memory of its own kind."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.numel() > 0


class Descent:
    """The tensors that descend from bad writes, each with the label of the first of these; keeps none alive.

    An infinity may become a zero, and that another infinity, in calls that lie many steps apart.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._by_memory: dict[int, tuple[Any, str]] = {}
        self._order: dict[str, int] = {}  # of the labels, the earliest write first

    def __bool__(self) -> bool:
        return bool(self._by_id or self._by_memory)

    def add(self, tensor: Tensor, label: str) -> None:
        """A tensor was left not finite by the write with that label, or was made of what it left."""
        if self.label(tensor):
            return
        self._order.setdefault(label, len(self._order))
        self._by_id[id(tensor)] = weakref.ref(tensor), label
        if has_memory(tensor):
            self._by_memory[storage_key(tensor)] = storage_ref(tensor), label

    def healed(self, tensor: Tensor) -> None:
        """A tensor was found finite."""
        self._by_id.pop(id(tensor), None)
        if self._by_memory and has_memory(tensor):
            self._by_memory.pop(storage_key(tensor), None)

    def label(self, tensor: Tensor) -> str:
        """The label of the write that a tensor descends from; empty where it descends from none."""
        if not self:
            return ""
        known = self._by_memory.get(storage_key(tensor)) if self._by_memory and has_memory(tensor) else None
        return known[1] if known is not None else self.label_by_id(id(tensor))

    def label_by_id(self, identity: int) -> str:
        """Returns the label of a tensor given by ``id``, as `label` does, if it is alive."""
        tensor, label = self._by_id.get(identity, (lambda: None, ""))
        return label if tensor() is not None else ""

    def called(
        self, func: Callable[..., Any], args: Any, kwargs: Any, made: Iterable[Tensor], *, in_place: bool
    ) -> None:
        """The loop has called a function.

        Args:
            func: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            made: What it returned or wrote.
            in_place: It wrote into its first argument.
        """
        if not self or not reads_values(func):
            return
        overwrites = in_place and getattr(func, "__name__", "") in OVERWRITES
        read = tensor_tree.tensors((args[1:] if overwrites else args, kwargs))
        labels = {label for each in read if (label := self.label(each))}
        if labels:
            label = min(labels, key=self._order.__getitem__)
            for tensor in made:
                self.add(tensor, label)

    def follow(self, tape: Tape, sources: Iterable[int], label: str) -> None:
        """Adds what the calls on a tape made of the results of some of them, and those results."""
        derived = depending(tape, sources)
        for tensor, source in list(tape.results.alive()):
            if source.entry in derived:
                self.add(tensor, label)

    def readers(self, tape: Tape, start: int = 0) -> dict[str, list[int]]:
        """Returns by label the entries of a tape, from number ``start`` on, that read from outside what has it."""
        found: dict[str, list[int]] = {}
        for number in range(max(start, tape.start), tape.end):
            for outside in tape[number].arguments.outside:
                if label := self.label_by_id(outside.identity) or self.label(outside.tensor):
                    found.setdefault(label, []).append(number)
        return found

    def sweep(self) -> None:
        """Forgets what is gone."""
        self._by_id = {key: known for key, known in self._by_id.items() if known[0]() is not None}
        self._by_memory = {key: known for key, known in self._by_memory.items() if not known[0].expired()}


#: Times that what a line makes was bad as it was given (a mask, a sentinel) before that is what it is for.
TIMES_GIVEN = 3


class Condition:
    """Remembers what looks at carried tensors have shown; keeps none of them alive.

    Attributes:
        descent: What comes of bad writes.
    """

    def __init__(self) -> None:
        self.descent = Descent()
        self._finite: set[str] = set()  # names of those that were seen to be
        self._given: set[str] = set()  # names of those that are not, and that no call of the loop's made so
        self._times: dict[str, int] = {}  # that each was found so
        self._unread: set[str] = set()  # labels of writes of which it was not told yet that a step has read them

    def __bool__(self) -> bool:
        """Whether something bad is there that no step has read yet."""
        return bool(self._unread and self.descent)

    def seen(self, name: str, tensors: Iterable[tuple[Tensor | None, bool]]) -> list[int]:
        """Takes down what a look has shown of the tensors of one name.

        Args:
            name: Their name.
            tensors: Each, as far as it is alive, with whether it is finite.

        Returns:
            The positions of those that are not finite, and of which it is not known yet why.
        """
        each_finite, bad = True, []
        for place, (tensor, finite) in enumerate(tensors):
            each_finite &= finite
            if finite and tensor is not None:
                self.descent.healed(tensor)
            elif not finite and not (tensor is not None and self.descent.label(tensor)):
                bad.append(place)
        if each_finite:
            self._given.discard(name)
            self._finite.add(name)
        is_known = name in self._given or self._times.get(name, 0) >= TIMES_GIVEN
        return [] if is_known else bad

    def was_finite(self, name: str) -> bool:
        """Whether one was finite when it was looked at before."""
        return name in self._finite

    def unknown(self, names: Iterable[str]) -> None:
        """A look at these was not waited for."""
        self._finite.difference_update(names)

    def given(self, names: Iterable[str]) -> None:
        """Notes tensors that are not finite though no call of the loop's made them so."""
        for name in set(names):
            self._given.add(name)
            self._times[name] = self._times.get(name, 0) + 1

    def is_given(self, name: str) -> bool:
        """Whether one only hands on what comes from outside, as a buffer for batches does."""
        return name in self._given

    def left(self, label: str) -> None:
        """A write has left something bad, which steps to come may read."""
        self._unread.add(label)

    def read(self, labels: set[str]) -> set[str]:
        """A step has read what comes of these writes; returns those that none had read before."""
        new = self._unread & labels
        self._unread -= new
        return new
