"""Layers that a model runs and does not list among its submodules: a replay leaves them as it found them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ampscope.capture.torch_support.calls.threads import origin


@contextlib.contextmanager
def left_as_found(known: Collection[int]) -> Iterator[None]:
    """Puts back, after the body, the state of every module that runs in it and whose ``id`` is not ``known``.

    A teacher kept in a list, a layer kept in a closure: nobody knows their state at the start of the step. So they run
    on what they hold now; whether that gives the same shows in what they return.

    Args:
        known: The modules that a replay runs on substitutes.
    """
    found: dict[int, Callable[[], None]] = {}
    here = origin()

    def look(module: nn.Module, _: Any) -> None:
        if id(module) not in known and id(module) not in found and origin() == here:
            found[id(module)] = _restorer(module)

    handle = register_module_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()
        for put_back in found.values():
            put_back()


def _restorer(module: nn.Module) -> Callable[[], None]:
    """Remembers the attributes of a module (and the module itself, so that its ``id`` stays its) and its buffers."""
    attributes, held = dict(module.__dict__), dict(module.__dict__["_buffers"])
    plain = (value for value in attributes.values() if isinstance(value, Tensor) and value.is_leaf)
    tensors = [tensor for tensor in (*held.values(), *plain) if tensor is not None and not tensor.requires_grad]
    copies = [tensor.detach().clone() for tensor in tensors]

    def put_back() -> None:
        module.__dict__.clear()
        module.__dict__.update(attributes)
        module.__dict__["_buffers"].clear()
        module.__dict__["_buffers"].update(held)
        for tensor, copied in zip(tensors, copies, strict=True):
            if not torch.equal(tensor, copied):
                tensor.data.copy_(copied)  # past the change counter: nobody but the replay has written

    return put_back
