"""A distributed tensor is looked at as far as it lies on this rank; modules that are sharded are known."""

from __future__ import annotations

import sys
from collections.abc import Iterable
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


_FSDP1 = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
_FSDP2 = ("torch.distributed.fsdp", "FSDPModule")


def _is_a(module: nn.Module, home: str, name: str) -> bool:
    kind: Any = getattr(sys.modules.get(home), name, None)
    return isinstance(kind, type) and issubclass(type(module), kind)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` (FSDP2) was applied to this very module."""
    return _is_a(module, *_FSDP2)


def class_name(module: nn.Module) -> str:
    """The name of a module's class as the user wrote it: without what ``fully_shard`` put before it."""
    kind = type(module)
    if not is_fully_sharded(module):
        return kind.__name__
    own = [each for each in kind.__mro__ if each.__module__.partition(".")[0] != "ampscope"]
    marker = next(index for index, each in enumerate(own) if each.__name__ == "FSDPModule")
    return own[marker + 1].__name__


_IN_PARTS = "the parameters lie in parts on several ranks"


def obstacle_to_replay(modules: Iterable[nn.Module]) -> str:
    """Why no step of these modules can be run again on one rank; empty where none of them speaks against it.

    A replay that ended in the middle would leave the wrapper's own record of what is gathered in disorder, so it does
    not begin.
    """
    for module in modules:
        if is_fully_sharded(module) or _is_a(module, *_FSDP1) or getattr(module, "_is_fsdp_managed_module", False):
            return f"{_IN_PARTS} (FSDP), and gathering them again would communicate"
        for parameter in module._parameters.values():
            if hasattr(parameter, "ds_id"):
                return f"{_IN_PARTS} (ZeRO-3), and gathering them again would communicate"
            if type(parameter) is not nn.Parameter and parameter is not None and is_divided(parameter):
                return f"{_IN_PARTS} (tensor parallelism), and computing with them again would communicate"
    return ""
