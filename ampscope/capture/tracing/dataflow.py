"""Which op last wrote each storage, and so which op gave another its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.local_shards import PLAIN
from ampscope.capture.torch_support.torch_private import HeldStorages
from ampscope.trace.schema import EdgeRow, Node, Statistics

#: Bytes that ops give between two looks at what is gone: each small thing kept between large ones is a hole in memory
#: that the training finds no use for.
SWEPT_EVERY = 64 << 20


class Edge(NamedTuple):
    """An operand and the op that last wrote it."""

    seq: int
    arg: int
    from_seq: int
    from_out: int
    in_place: bool
    measurement: int | None  #: of the operand itself, where it is a part of what was written


class Writer(NamedTuple):
    """Who last wrote a storage."""

    seq: int
    out: int
    numel: int
    offset: int  #: where in the storage the written region begins, elements


class Dataflow:
    """The edges between the ops of one step; keeps no tensor, but the identity of each storage it has seen.

    Args:
        measure: Measures a part of what an op wrote that another reads, and numbers the measurement; None for no such.
    """

    def __init__(self, measure: Callable[[Tensor], int | None] | None) -> None:
        self._measure = measure
        self._edges: list[Edge] = []
        self._writers: dict[int, Writer] = {}
        self._entries: dict[int, tuple[Node, str]] = {}
        self._held = HeldStorages()  # so that no key is given to another storage
        self._unswept = 0  # bytes

    def name_entry(self, tensor: Tensor, node: Node, name: str) -> None:
        """Says where a tensor that no op of the step wrote comes from, unless that was said."""
        self._entries.setdefault(self._key(tensor), (node, name))

    def entry(self, tensor: Tensor) -> tuple[Node, str] | None:
        """Where a tensor that no op of the step wrote comes from."""
        return self._entries.get(self._key(tensor))

    def writer(self, tensor: Tensor) -> Writer | None:
        """Who last wrote the storage of a strided tensor; None where no op of the step did."""
        return self._writers.get(self._key(tensor))

    def wrote(self, seq: int, results: Sequence[Tensor]) -> None:
        """An op has written these."""
        for out, tensor in enumerate(results):
            self._unswept += tensor.nbytes
            if tensor.layout is torch.strided:
                self._writers[self._key(tensor)] = Writer(seq, out, tensor.numel(), int(tensor.storage_offset()))
        if self._unswept > SWEPT_EVERY:
            self._sweep()

    def read(self, seq: int, arg: int, writer: Writer | None, operand: Tensor, *, in_place: bool) -> None:
        """An op has read (or overwrites, ``in_place``) an operand; nothing is noted where its writer is not known."""
        if writer is None:
            return
        own = None
        if self._measure is not None and not in_place and operand.layout is torch.strided:
            partial = (operand.numel(), operand.storage_offset()) != (writer.numel, writer.offset)
            own = self._measure(operand) if partial else None
        self._edges.append(Edge(seq, arg, writer.seq, writer.out, in_place, own))

    def sent(self, seq: int, arg: int, writer: Writer | None, measurement: int | None) -> None:
        """An op that communicates has sent an operand, which was measured before it: the op may overwrite it."""
        if writer is not None:
            self._edges.append(Edge(seq, arg, writer.seq, writer.out, in_place=False, measurement=measurement))

    def rows(self, step: int, source: str, measured: Sequence[Statistics]) -> list[EdgeRow]:
        """The trace's rows."""
        return [_row(step, source, e, None if e.measurement is None else measured[e.measurement]) for e in self._edges]

    def clear(self) -> None:
        """Lets go of everything."""
        self._edges.clear()
        self._writers.clear()
        self._entries.clear()
        self._held.release()

    def _key(self, tensor: Tensor) -> int:
        plain = type(tensor) in PLAIN
        key = tensor.untyped_storage()._cdata if plain else torch_private.storage_key(tensor)
        if key not in self._writers and key not in self._entries:
            self._held.hold(key, tensor)
        return key

    def _sweep(self) -> None:
        """Forgets the storages that are gone."""
        self._unswept = 0
        for key in self._held.sweep():
            self._writers.pop(key, None)
            self._entries.pop(key, None)


def _row(step: int, source: str, edge: Edge, own: Statistics | None) -> EdgeRow:
    low, high = (own.min, own.max) if own is not None else (None, None)
    return EdgeRow(step, source, *edge[:-1], own is not None, low, high)
