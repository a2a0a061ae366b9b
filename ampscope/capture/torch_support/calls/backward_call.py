"""The arguments of ``torch.autograd.backward``, whether given by position or by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ampscope.capture.torch_support import tensor_tree


def backward_roots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What ``torch.autograd.backward`` was called on."""
    return list(tensor_tree.tensors(args[0] if args else kwargs.get("tensors")))


def creates_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a backward was asked to be differentiable itself (its fourth argument)."""
    return bool(args[3] if len(args) > 3 else kwargs.get("create_graph"))
