"""Keeps what a forward may change as it was when the step began, so that the step can be run again from there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.torch_private import version_counter

#: Steps after which the list of tensors that a forward may change is drawn up anew.
REVIEW_EVERY = 50
#: Buffers above this size are copied every step only once they have changed.
SMALL_BUFFER_BYTES = 1 << 20


class StateSnapshot:
    """What a forward may change, as it was at the start of the step.

    These are buffers (BatchNorm statistics, moving averages), tensors in plain attributes, frozen parameters, and the
    modules' attributes themselves (counters, hidden states).

    Args:
        models: The watched models.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  #: id -> tensor, copy
        self._versions: dict[int, int] = {}
        self._changing: set[int] = set()
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._candidates: list[Tensor] = []
        self._buffer_ids: list[int] = []  # at the last look
        self._steps = 0

    def take(self) -> None:
        """Copies what may change; called at the first forward of a step."""
        self._attributes = [
            (module, {**vars(module), "_buffers": dict(vars(module)["_buffers"])}) for module in self._models.modules
        ]
        self._review()
        with torch.no_grad():
            live = [tensor for tensor in self._candidates if self._may_change(tensor)]
            if [id(tensor) for tensor in live] != list(self._copies):
                self._copies = {id(tensor): (tensor, tensor.detach().clone()) for tensor in live}
            elif live:
                torch._foreach_copy_([copied for _, copied in self._copies.values()], live)

    def _review(self) -> None:
        """Draws up the list of what may change: every so often, and when a buffer was replaced by another tensor."""
        buffer_ids = [id(buffer) for _, _, buffer in self._models.buffers()]
        if self._steps % REVIEW_EVERY == 0 or buffer_ids != self._buffer_ids:
            self._candidates = list(self._models.mutable_tensors())
            self._buffer_ids = buffer_ids
        self._steps += 1

    def _may_change(self, tensor: Tensor) -> bool:
        if tensor.numel() * tensor.element_size() <= SMALL_BUFFER_BYTES:
            return True
        key, now = id(tensor), version_counter(tensor)
        if self._versions.setdefault(key, now) != now:
            self._changing.add(key)
        return key in self._changing

    def at_start(self, tensor: Tensor) -> Tensor | None:
        """A fresh copy of a tensor as it was at the start of the step; None for those that never change."""
        known = self._copies.get(id(tensor))
        return known[1].clone() if known is not None else None

    def attributes(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Every module with its attributes as they were at the start of the step."""
        return self._attributes
