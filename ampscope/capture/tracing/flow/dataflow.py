"""Follows which op last wrote each storage, and so which op gave another its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.torch_support.local_shards import PLAIN, local
from ampscope.capture.torch_support.torch_private import HeldStorages, weak_ref
from ampscope.trace.schema import Node

#: Bytes that ops give between two looks at what is gone: each small thing kept between large ones is a hole in memory
#: that the training finds no use for.
SWEPT_EVERY = 64 << 20


class Dataflow:
    """The edges between the ops of one step; keeps no tensor, but the identity of each storage it has seen.

    An output is known by its number among all outputs of the step.

    Args:
        measure: Measures a part of what an op wrote that another reads, and numbers the measurement; None for no such.

    Attributes:
        read_from: Of each operand of each op, in order, the output that it was.
        parts: By place in ``read_from``, the measurement of an operand that is a part of what was written.
    """

    def __init__(self, measure: Callable[[Tensor], int | None] | None) -> None:
        self.read_from: list[int] = []
        self.parts: dict[int, int | None] = {}
        self.written: dict[int, int] = {}  #: by storage, the output that was last written to it
        self._measure = measure
        self._regions: dict[int, tuple[int, int]] = {}  # elements of an output, and where in the storage it begins
        self._entries: dict[int, tuple[Node, str]] = {}
        self._held = HeldStorages()  # so that no key is given to another storage
        self._unswept = 0  # bytes

    def name_entry(self, tensor: Tensor, node: Node, name: str) -> None:
        """Says where a tensor that no op of the step wrote comes from, unless that was said."""
        storage = _storage(tensor)
        key = storage._cdata
        if key not in self._entries:
            if key not in self._held.references:
                self._held.references[key] = weak_ref(storage)
            self._entries[key] = node, name

    def entry(self, tensor: Tensor) -> tuple[Node, str] | None:
        """Returns from where a tensor came that no op of the step wrote; None where that is unknown."""
        return self._entries.get(_storage(tensor)._cdata)

    def writer(self, tensor: Tensor) -> int | None:
        """The output that was last written to the storage of a strided tensor; None where no op of the step wrote."""
        return self.written.get(_storage(tensor)._cdata)

    def wrote(self, first: int, results: Sequence[Tensor]) -> None:
        """Notes that an op has written ``results``.

        Args:
            first: The number of the first.
            results: Its outputs.
        """
        held = self._held.references
        for output, tensor in enumerate(results, first):
            self._unswept += tensor.nbytes
            if tensor.layout is not torch.strided:
                continue
            storage = (tensor if tensor.__class__ in PLAIN else local(tensor)).untyped_storage()  # as `_storage`
            key = storage._cdata
            if key not in held:
                held[key] = weak_ref(storage)
            self.written[key] = output
            if self._measure is not None:
                self._regions[output] = (tensor.numel(), int(tensor.storage_offset()))
        if self._unswept > SWEPT_EVERY:
            self._sweep()

    def look_at_parts(self, operands: Sequence[Tensor], writers: Sequence[int], overwritten: Sequence[int]) -> None:
        """An op has read its operands: those that are parts of what was written are measured, where that is asked.

        Args:
            operands: All of them.
            writers: The outputs that they were.
            overwritten: Positions of those that it overwrites.
        """
        if self._measure is not None:
            place = len(self.read_from)
            for arg, (operand, writer) in enumerate(zip(operands, writers, strict=True)):
                if arg not in overwritten and operand.layout is torch.strided:
                    region = (operand.numel(), operand.storage_offset())
                    if region != self._regions.get(writer, (operand.numel(), 0)):
                        self.parts[place + arg] = self._measure(operand)

    def sent(self, writer: int, measurement: int | None) -> None:
        """An op that communicates has sent an operand, which was measured before it: the op may overwrite it."""
        self.parts[len(self.read_from)] = measurement
        self.read_from.append(writer)

    def clear(self) -> None:
        """Lets go of everything."""
        self.read_from = []
        self.parts.clear()
        self.written.clear()
        self._regions.clear()
        self._entries.clear()
        self._held.release()

    def _sweep(self) -> None:
        """Forgets the storages that are gone."""
        self._unswept = 0
        for key in self._held.sweep():
            self.written.pop(key, None)
            self._entries.pop(key, None)


def _storage(tensor: Tensor) -> Any:
    """The memory of a tensor; its `torch_private.storage_key` is what torch calls it by."""
    return (tensor if tensor.__class__ in PLAIN else local(tensor)).untyped_storage()
