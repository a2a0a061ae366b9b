"""Follows tensors that are not finite because of a write of the loop's, and what is made of them, while they live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ampscope.capture.replay.tape.call_tape import Tape
from ampscope.capture.step.carried.carried_tensors import has_memory
from ampscope.capture.step.carried.listening.gap import OVERWRITES, depending
from ampscope.capture.torch_support import tensor_tree
from ampscope.capture.torch_support.calls.function_names import reads_values
from ampscope.capture.torch_support.torch_private import storage_key, storage_ref


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
