"""Tells autograd nodes that were made on another thread than the forward's from those of the forward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from ampscope.capture.torch_support.torch_private import node_sequence_number


class _Given(NamedTuple):
    """A tensor that an op gave."""

    tensor: weakref.ref[Tensor]
    numbers: range | None
    site: int | None


class MarkedNodes:
    """Nodes that a backward made which records a graph of itself, each marked with the op that it belongs to.

    On an accelerator such a backward runs on a thread of the device. A later one evaluates its nodes and the forward's
    side by side, and no number tells them apart: each thread counts its own. Nor can a node be marked when it is made,
    for a tensor has none yet while the op runs that gives it. But an op that reads the tensor leads the engine to its
    node, and comes first.
    """

    def __init__(self) -> None:
        self.unread: dict[int, _Given] = {}  #: by the tensor's ``id``, what was noted and not read yet
        self.has_any = False  #: some node is marked
        self._key = object()  # of the mark, among what a node keeps for others

    def gave(self, results: Iterable[Tensor], numbers: range | None, site: int | None) -> None:
        """Notes what an op gives on such a thread.

        Args:
            results: The tensors.
            numbers: Those of the nodes that the op made; None where it runs inside a function that has made the node.
            site: The op's; None where the node belongs to no op.
        """
        for result in results:
            self.unread[id(result)] = _Given(weakref.ref(result), numbers, site)

    def read(self, operands: Iterable[Tensor]) -> None:
        """Marks the nodes of what was noted among these tensors.

        Only for the operands of an op that has made a node, or for what a backward begins at: autograd has asked for
        their nodes itself, or is about to, and may make them then.
        """
        for operand in operands:
            given = self.unread.get(id(operand))
            if given is None or given.tensor() is not operand:
                continue
            del self.unread[id(operand)]
            node: Any = operand.grad_fn
            if node is not None and (given.numbers is None or node_sequence_number(node) in given.numbers):
                node.metadata[self._key] = given.site
                self.has_any = True

    def has(self, node: Any) -> bool:
        """Whether a node is marked."""
        return self.has_any and self._key in node.metadata

    def site(self, node: Any) -> int | None:
        """The site that a marked node belongs to."""
        found: int | None = node.metadata[self._key]
        return found

    def clear(self) -> None:
        """Lets go of the tensors."""
        self.unread.clear()
