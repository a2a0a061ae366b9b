"""Lets a step run again on stand-ins for parameters, buffers and module attributes, so that none of them changes."""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.models import Models
from ampscope.capture.tape import version

#: Buffers above this size are copied every step only once they were seen to change.
SMALL_BUFFER_BYTES = 1 << 20

_COPIED = (list, dict, set, collections.deque)


class BufferKeeper:
    """Keeps the buffers' values at the start of the step: BatchNorm statistics, moving averages.

    Args:
        models: The watched models.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  #: id -> buffer, copy
        self._versions: dict[int, int] = {}
        self._changing: set[int] = set()

    def take(self) -> None:
        """Copies what may change; called at the first forward of a step."""
        with torch.no_grad():
            live = [buffer for *_, buffer in self._models.buffers() if self._may_change(buffer)]
            if [id(buffer) for buffer in live] != list(self._kept):
                self._kept = {id(buffer): (buffer, buffer.detach().clone()) for buffer in live}
            elif live:
                torch._foreach_copy_([kept for _, kept in self._kept.values()], live)

    def _may_change(self, buffer: Tensor) -> bool:
        if buffer.numel() * buffer.element_size() <= SMALL_BUFFER_BYTES:
            return True
        key, now = id(buffer), version(buffer)
        if self._versions.setdefault(key, now) != now:
            self._changing.add(key)
        return key in self._changing

    def at_start(self, buffer: Tensor) -> Tensor:
        """A fresh copy of a buffer as it was at the start of the step (of its present value if it was not kept)."""
        kept = self._kept.get(id(buffer))
        return (kept[1] if kept is not None else buffer).detach().clone()


class StandIns:
    """Stand-ins for the leaves of one replay: aliases of parameters that share memory but gather their own gradients.

    Hooks on the real parameters (an optimizer in backward, ``DistributedDataParallel``'s reducer) never see them.
    """

    def __init__(self, models: Models, buffers: BufferKeeper) -> None:
        self._models = models
        self._leaves: dict[int, Tensor] = {}
        self._buffers = {id(b): buffers.at_start(b) for *_, b in models.buffers()}

    def leaf(self, tensor: Tensor) -> Tensor:
        """The stand-in of a parameter or another leaf; buffers give their copy, everything else itself."""
        if id(tensor) in self._buffers:
            return self._buffers[id(tensor)]
        if not tensor.requires_grad or tensor.grad_fn is not None:
            return tensor
        known = self._leaves.get(id(tensor))
        if known is None:
            alias = tensor.detach()
            known = nn.Parameter(alias) if isinstance(tensor, nn.Parameter) else alias.requires_grad_()
            self._leaves[id(tensor)] = known
        return known

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter that took part, by name, as its stand-in."""
        for key, (name, _) in self._models.parameters.items():
            if key in self._leaves:
                yield name, self._leaves[key]

    def named_buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        """Module, name and stand-in of every buffer."""
        for module, _, name, buffer in self._models.buffers():
            if id(buffer) in self._buffers:
                yield module, name, self._buffers[id(buffer)]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the stand-ins into the modules for the body, and everything back as it was after it."""
        before = [(module, dict(module.__dict__)) for module in self._models.modules]
        try:
            for module, attributes in before:
                module.__dict__.update({key: _private_copy(value) for key, value in attributes.items()})
                self._swap(module)
            yield
        finally:
            for module, attributes in before:
                module.__dict__.clear()
                module.__dict__.update(attributes)

    def _swap(self, module: nn.Module) -> None:
        for held in (module.__dict__["_parameters"], module.__dict__["_buffers"]):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = self._keep_leaf(tensor)

    def _keep_leaf(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            return tensor
        return self.leaf(tensor)


def _private_copy(value: Any) -> Any:
    """A shallow copy of a container attribute, so that what the replay appends is forgotten with it."""
    return copy.copy(value) if isinstance(value, _COPIED) else value
