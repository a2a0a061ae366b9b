"""The part of a distributed tensor that lies on this rank: the only part AMPscope ever looks at."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

#: The classes of tensors that are what they seem: no wrapper, no shard.
PLAIN = (Tensor, nn.Parameter)


def _class(home: str, name: str) -> type | None:
    """A class of torch's, where its module is loaded; nothing of it exists otherwise."""
    found: Any = getattr(sys.modules.get(home), name, None)
    return found if isinstance(found, type) else None


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``: each rank holds a part of it."""
    if type(tensor) in PLAIN:
        return False
    kind = _class("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def is_divided(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor`` of which other ranks hold other parts; the same on all is none of these."""
    if not is_sharded(tensor):
        return False
    held: Any = tensor
    sizes = zip(held.placements, held.device_mesh.shape, strict=True)
    return any(size > 1 and not placement.is_replicate() for placement, size in sizes)


def local(tensor: Tensor) -> Tensor:
    """Returns the part of ``tensor`` in this rank's memory, detached; one that is not distributed, as it is.

    Asks no other rank and waits for none. An operation on the ``DTensor`` itself might: the norm of a sharded tensor
    is a collective, and on one rank alone it never ends.
    """
    if type(tensor) in PLAIN:
        return tensor
    if is_sharded(tensor):
        with torch.no_grad():  # with gradients, the shard would get a history
            tensor = tensor.to_local()  # type: ignore[attr-defined]  # a DTensor has it
    return _without_wait(tensor)


def has_arrived(tensor: Tensor) -> bool:
    """Whether the values are there: not where a collective that the loop has begun may still be writing them."""
    return type(tensor) in PLAIN or not _may_arrive_later(local(tensor))


def _may_arrive_later(tensor: Tensor) -> bool:
    kind = _class("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    return kind is not None and isinstance(tensor, kind)


def _without_wait(tensor: Any) -> Tensor:
    """Returns a collective's result where the loop has waited for it; else the tensor that would wait."""
    arrived: Tensor = tensor.elem if _may_arrive_later(tensor) and tensor.completed else tensor
    return arrived
