"""Layers that a model runs and does not list among its submodules: a replay leaves them as it found them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ampscope.capture.replay.state.own_attributes import give
from ampscope.capture.torch_support.calls.threads import origin


@contextlib.contextmanager
def left_as_found(known: Collection[int], unseen: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Gives every module that runs in the body, and whose ``id`` is not ``known``, attributes of its own there.

    A teacher kept in a list, a layer kept in a closure: nobody knows their state at the start of the step. So they run
    on copies of what they hold now; whether that gives the same shows in what they return.

    Args:
        known: The modules that a replay runs on substitutes.
        unseen: Keeps the copying out of what is observed.
    """
    here = origin()
    found: dict[int, nn.Module] = {}
    copies: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, so that its ``id`` stays its

    def copied(value: Any) -> Any:
        if not issubclass(type(value), Tensor) or not value.is_leaf or value.requires_grad:
            return value
        if id(value) not in copies:
            copies[id(value)] = value, value.detach().clone()
        return copies[id(value)][1]

    def look(module: nn.Module, _: Any) -> None:
        if id(module) not in known and origin() == here and id(module) not in found:
            found[id(module)] = module
            with unseen():
                held = {name: copied(value) for name, value in vars(module).copy().items()}
                held["_buffers"] = {name: copied(buffer) for name, buffer in held["_buffers"].items()}
            give(module, held)

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()
