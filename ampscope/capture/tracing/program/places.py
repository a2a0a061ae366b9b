"""Finds the user's line that an op belongs to: the one that runs, or in backward the one that the forward op was on."""

from __future__ import annotations

import threading
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.hooks import process_hooks
from ampscope.capture.torch_support import torch_private
from ampscope.capture.torch_support.user_line import NOWHERE, Place, user_place
from ampscope.capture.tracing.sites import Sites

#: Frames below which code that runs in backward has no line of its own.
_BACKWARD = (process_hooks.backward_frame, Tensor.backward.__code__, torch.autograd.grad.__code__)

#: Autograd nodes that one op makes, at most: one for each level of transforms of torch.func.
MOST_NODES = 8


class Places:
    """The user's lines, and the forward op that made each autograd node.

    Args:
        sites: The numbered program points.
        stops: Code objects at which the search for the user's line ends.
    """

    def __init__(self, sites: Sites, stops: tuple[CodeType, ...]) -> None:
        self.entry_place = NOWHERE  #: the user's line of the call being replayed
        self._sites = sites
        self._stops = stops
        self._stops_in_backward = (*stops, *_BACKWARD, process_hooks.original_backward().__code__)
        self._thread = threading.get_ident()  # that forward runs on
        self._forward_of: dict[int, int] = {}  # autograd sequence number -> site of the forward op
        self._last_number = -1
        self._made = range(0)  # the numbers of the nodes that were made last

    def now(self) -> Place:
        """The line of a torch function that is being called."""
        node = torch_private.current_backward_node()
        if node is None:
            return user_place(*self._stops) or self.entry_place
        return user_place(*self._stops_in_backward) or self._of_node(node)

    def inside_backward(self) -> Place | None:
        """The line of the user's own code in backward: a function's ``backward``, a hook; None outside of any."""
        return user_place(*self._stops_in_backward)

    @property
    def numbers_nodes(self) -> bool:
        """Whether nodes made now are numbered with those of forward: each thread counts its own."""
        return threading.get_ident() == self._thread

    def _of_node(self, node: Any) -> Place:
        """The line of the forward op whose gradient is being computed."""
        site = self.forward_site(node)
        return self._sites.point(site).place if site is not None else self.entry_place

    def forward_site(self, node: Any) -> int | None:
        """The site of the forward op that made an autograd node; None where no traced op did."""
        return self._forward_of.get(torch_private.node_sequence_number(node))

    def made_node(self) -> bool:
        """Whether an autograd node was made since this was last asked."""
        number = torch_private.next_sequence_number()
        before = max(self._last_number, number - MOST_NODES) if self._last_number >= 0 else number - 1
        self._made, self._last_number = range(before, number), number
        return bool(self._made)

    def link(self, site: int) -> None:
        """The nodes that were made last are those of the op at ``site``: one for each transform that it runs in."""
        for number in self._made:
            self._forward_of[number] = site

    def clear(self) -> None:
        """Forgets which op made which node."""
        self._forward_of.clear()
