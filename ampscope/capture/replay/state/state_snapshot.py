"""Keeps what a forward may change as it was when the step began, so that the step can be run again from there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.replay.state.attribute_tensors import AttributeTensor, AttributeTensors
from ampscope.capture.torch_support.models import Models, held_buffers
from ampscope.capture.torch_support.tensor_tree import inner_tensors
from ampscope.capture.torch_support.torch_private import version_counter

#: Steps after which the list of tensors that a forward may change is drawn up anew.
REVIEW_EVERY = 50
#: Buffers above this size are copied every step only once they have changed.
SMALL_BUFFER_BYTES = 1 << 20

_Named = dict[tuple[int, str], Tensor]  # buffers by ``id`` of their module and by name


class StateSnapshot:
    """Keeps what a forward may change, as it was at the start of the step.

    These are buffers (BatchNorm statistics, moving averages), tensors in plain attributes, frozen parameters, and the
    modules' attributes themselves (counters, hidden states).

    Args:
        models: The watched models.

        keeps_before: Also as it was at the start of the step before: for who wants back what has been poisoned since.

    Attributes:
        held: Finds what modules keep in plain attributes.
    """

    def __init__(self, models: Models, *, keeps_before: bool = False) -> None:
        self._models = models
        self.keeps_before = keeps_before
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  #: likewise, of the step before
        self._buffers: tuple[_Named, _Named] = {}, {}  # at the start of the step, and of the step before
        self.held = AttributeTensors(models)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  #: id -> tensor, copy
        self._versions: dict[int, int] = {}
        self._changing: set[int] = set()
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._candidates: list[Tensor] = []
        self._in_attributes: list[AttributeTensor] = []
        self._replaceable: list[int] = []  # at the last look
        self._revision = -1  # of the models, likewise
        self._taken_at = -1  # revision of the models at the start of the step
        self._steps = 0

    def take(self) -> None:
        """Copies what may change; called at the first forward of a step."""
        copies = [module.__dict__.copy() for module in self._models.modules]
        for attributes in copies:
            attributes["_buffers"] = dict(attributes["_buffers"])
        self._attributes = list(zip(self._models.modules, copies, strict=True))
        self.held.search()
        holds = bool(self.held)
        if holds:
            self.held.keep(self._attributes)
        self._review()
        self._taken_at = self._revision
        self._in_attributes = []
        if not (self._candidates or self._copies or holds or self.keeps_before):
            return
        with torch.no_grad():
            self._in_attributes = self.held.now() if holds else []
            live = [tensor for tensor in (*self._candidates, *self._nested()) if self._may_change(tensor)]
            if self.keeps_before:
                self._before, self._copies = self._copies, self._before
                self._buffers = {(id(each), name): tensor for each, name, tensor in self.statistics()}, self._buffers[0]
            if [id(tensor) for tensor in live] != list(self._copies):
                self._copies = {id(tensor): (tensor, tensor.detach().clone()) for tensor in live}
            elif live:
                torch._foreach_copy_([copied for _, copied in self._copies.values()], live)

    def let_go(self) -> None:
        """Keeps nothing alive that modules held and hold no more; `take` comes before it is asked for again."""
        self._attributes, self._in_attributes = [], []

    def forget(self) -> None:
        """Lets go of the state; `take` comes before it is asked for again."""
        self._copies, self._attributes, self._candidates, self._in_attributes = {}, [], [], []
        self._before, self._buffers = {}, ({}, {})
        self._revision = -1

    def _review(self) -> None:
        """Draws up the list of what may change: every so often, and when it is known to be another."""
        replaceable, revision = self._models.replaceable_tensors(), self._models.revision
        if self._steps % REVIEW_EVERY == 0 or (replaceable, revision) != (self._replaceable, self._revision):
            held = self._models.mutable_tensors()
            self._candidates = [each for tensor in held for each in (inner_tensors(tensor) or [tensor])]
            self._replaceable, self._revision = replaceable, revision
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

    def statistics(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """The modules' buffers as they are now, and, where they may be wanted back, tensors in plain attributes."""
        yield from held_buffers(self._models.modules)
        yield from self.held.held_directly() if self.keeps_before else ()

    def buffer(self, module: nn.Module, name: str) -> Tensor | None:
        """The tensor that one was at the start of the step; a forward may have put another in its place."""
        return self._buffers[0].get((id(module), name))

    def buffer_before(self, module: nn.Module, name: str) -> Tensor | None:
        """Returns the values of a buffer or attribute at the start of the step before; None where they are not kept."""
        known = self._before.get(id(self._buffers[1].get((id(module), name))))
        return known[1] if known is not None else None

    def restore(self, tensor: Tensor, value: Tensor) -> None:
        """Has the step begin from another value of a tensor; of those that `at_start` gives."""
        self._copies[id(tensor)][1].copy_(value)

    def gap(self) -> str:
        """Says what of the state at the start of the step is not known any more; empty when all is."""
        if self._taken_at != self._models.revision or not self._models.is_current():
            return "a layer or a parameter of the model was replaced within the step"
        listed = set(map(id, self._candidates))
        for tensor in (*self._candidates, *self._nested()):
            if id(tensor) not in self._copies and version_counter(tensor) != self._versions.get(id(tensor)):
                return "a large buffer was changed for the first time, and what it held before was not kept"
        for module, attributes in self._attributes:
            for name, value in attributes.items():
                written = issubclass(type(value), Tensor) and value.is_leaf and version_counter(value) > 0
                if written and id(value) not in listed and not inner_tensors(value):
                    return f"the tensor {name} of {type(module).__name__} was new, and what it held was not kept"
        return ""

    def attributes(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Every module with its attributes as they were at the start of the step."""
        return self._attributes

    def attribute_tensors(self) -> list[AttributeTensor]:
        """The tensors in plain attributes as they were referred to at the start of the step."""
        return self._in_attributes

    def _nested(self) -> Iterator[Tensor]:
        """Yields the tensors in attributes that lie in what an attribute holds, and are none themselves."""
        return (each.tensor for each in self._in_attributes if each.is_nested)
