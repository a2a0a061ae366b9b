"""Finds the modules whose parameters are sharded across ranks, and the names of the wrappers that shard them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from ampscope.capture.torch_support.local_shards import is_divided

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
