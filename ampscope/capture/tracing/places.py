"""`Places` finds the user's line of an op: the one that runs, or in backward the one that the forward op was on."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampscope.capture.hooks import process_hooks
from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.torch_private import node_sequence_number
from ampscope.capture.torch_support.user_line import NOWHERE, Place, place_of, user_place
from ampscope.capture.tracing import operators
from ampscope.capture.tracing.operators import Operator
from ampscope.capture.tracing.sites import Sites


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


#: Frames below which code that runs in backward has no line of its own.
_BACKWARD = (process_hooks.backward_frame, Tensor.backward.__code__, torch.autograd.grad.__code__)

#: Autograd nodes that one op makes, at most: one for each level of transforms of torch.func.
MOST_NODES = 8

#: What autograd calls for a result that a node has saved, whose node the tensor then gets.
_UNPACKS = "aten.detach.default"


_NONE = range(0)


@dataclass(slots=True)
class _Nodes:
    """The autograd nodes that one thread has made; each thread numbers its own."""

    sites: dict[int, int] = field(default_factory=dict)  #: autograd sequence number -> site of the forward op
    last: int = -1
    made: range = _NONE  #: the numbers of those that were made last


class Places:
    """The user's lines, and the forward op that made each autograd node.

    Args:
        sites: The numbered program points.
        stops: Code objects at which the search for the user's line ends.
    """

    def __init__(self, sites: Sites, stops: tuple[CodeType, ...]) -> None:
        self.entry_place = NOWHERE  #: the user's line of the call being replayed
        self.follows = False  #: what the op that runs now gives or reads is of interest for finding nodes (see `ran`)
        self._sites = sites
        self._stops = stops
        self._stops_in_backward = (*stops, *_BACKWARD, process_hooks.original_backward().__code__)
        #: Code below which code that runs in backward has no line of its own, by ``id``: comparing it reads all of it.
        self.ends = frozenset(map(id, self._stops_in_backward))
        self.thread = threading.get_ident()  #: the forward's
        self.forward = self.makes = _Nodes()  #: the nodes that this thread has made; and of the latest, their thread's
        self._nodes = {self.thread: self.forward}  # by thread
        self.marked = MarkedNodes()  #: those of a device's thread that the forward's backward comes by

    def now(self) -> Place:
        """The line of what runs."""
        return self.of_call(sys._getframe(1), torch_private.current_backward_node())

    def of_call(self, caller: FrameType, node: Any) -> Place:
        """The line of a torch function that is being called.

        Args:
            caller: The frame that calls it.
            node: The autograd node that is being evaluated; None outside of backward.
        """
        if node is None:
            return place_of(caller, *self._stops) or self.entry_place
        return place_of(caller, *self._stops_in_backward) or self._of_node(node)

    def makes_all(self) -> bool:
        """Whether a node's number tells its maker: this is the forward's thread, and no node is another's."""
        return threading.get_ident() == self.thread and not self.marked.has_any

    def inside_backward(self) -> Place | None:
        """The line of the user's own code in backward: a function's ``backward``, a hook; None outside of any."""
        return user_place(*self._stops_in_backward)

    def _of_node(self, node: Any) -> Place:
        """The line of the forward op whose gradient is being computed."""
        site = self.forward_site(node)
        return self._sites.point(site).place if site is not None else self.entry_place

    def forward_site(self, node: Any) -> int | None:
        """The site of the forward op that made an autograd node; None where no traced op did."""
        if self.marked.has(node):
            return self.marked.site(node)
        return self._makers_nodes().sites.get(torch_private.node_sequence_number(node))

    def _makers_nodes(self) -> _Nodes:
        """The nodes of the thread that made those which are being evaluated on this one, and are not marked.

        That is the forward's, unless what this thread made is evaluated by a backward that it called itself, as a
        reentrant checkpoint does on an accelerator's thread.
        """
        own = self._own_nodes()
        return own if own is self.forward or self._calls_backward() else self.forward

    def _own_nodes(self) -> _Nodes:
        """The nodes that the thread running now has made."""
        thread = threading.get_ident()
        return self._nodes.get(thread) or self._nodes.setdefault(thread, _Nodes())

    def _calls_backward(self) -> bool:
        """Whether a backward was called on this thread, and not only evaluated."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code not in self._stops_in_backward:
            frame = frame.f_back
        return frame is not None

    def made_node(self, number: int) -> bool:
        """Whether this thread has made an autograd node since this was last asked.

        Args:
            number: That of the next one.
        """
        elsewhere = threading.get_ident() != self.thread
        self.makes = nodes = self._own_nodes() if elsewhere else self.forward
        self.follows = elsewhere or bool(self.marked.unread)
        if nodes.last == number:
            nodes.made = _NONE
            return False
        before = max(nodes.last, number - MOST_NODES) if nodes.last >= 0 else number - 1
        nodes.made, nodes.last = range(before, number), number
        return bool(nodes.made)

    def ran(self, operator: Operator, operands: Iterable[Any], result: Any, *, creates_graph: bool) -> None:
        """Follows what an op gave on another thread than the forward's to the ops that read it.

        Args:
            operator: The op.
            operands: Its arguments.
            result: What it returned.
            creates_graph: The backward in progress records a graph of itself.
        """
        nodes = self._own_nodes()
        if nodes.made and self.marked.unread:
            self.marked.read(operators.flat_tensors(operands))
        if nodes is self.forward:
            return
        if nodes.made:
            self.marked.gave(operators.flat_tensors([result]), nodes.made, nodes.sites.get(nodes.made[-1]))
        elif creates_graph and not torch.is_grad_enabled() and operator.name != _UNPACKS:
            self.marked.gave(operators.flat_tensors([result]), None, None)  # inside a function, which has the node

    def clear(self) -> None:
        """Forgets which op made which node."""
        for nodes in self._nodes.values():
            nodes.sites.clear()
        self.marked.clear()
