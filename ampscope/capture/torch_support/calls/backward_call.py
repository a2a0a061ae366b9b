"""A call of ``torch.autograd.backward``: its arguments, given by position or by name, and where it leads."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import Tensor

from ampscope.capture.torch_support import tensor_tree

#: Nodes of autograd's graph that are looked at for a parameter.
MOST_NODES = 2000


def backward_roots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What ``torch.autograd.backward`` was called on."""
    return list(tensor_tree.tensors(args[0] if args else kwargs.get("tensors")))


def creates_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a backward was asked to be differentiable itself (its fourth argument)."""
    return bool(args[3] if len(args) > 3 else kwargs.get("create_graph"))


def leads_to(roots: list[Tensor], parameters: Container[int]) -> bool:
    """Whether a backward from ``roots`` reaches one of ``parameters`` (by ``id``), among the nodes looked at."""
    front = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(front)
    while front and len(seen) < MOST_NODES:
        node = front.pop()
        if id(getattr(node, "variable", None)) in parameters:  # only the nodes that accumulate gradients have one
            return True
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        front += new
    return False
