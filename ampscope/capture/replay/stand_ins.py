"""Lets a step run again on stand-ins for parameters, buffers and module attributes, so that none of them changes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.replay.state_twins import Surroundings, Twins, functions_of
from ampscope.capture.replay.tape import version
from ampscope.capture.torch_support.models import Models

#: Tensors from outside up to this size are replayed on copies, in case the step writes into them.
COPIED_BYTES = 64 << 20
#: Steps after which the list of tensors that a forward may change is drawn up anew.
REVIEW_EVERY = 50
#: Buffers above this size are copied every step only once they were seen to change.
SMALL_BUFFER_BYTES = 1 << 20


class StateKeeper:
    """Keeps what a forward may change as it was at the start of the step.

    These are buffers (BatchNorm statistics, moving averages), tensors in plain attributes, frozen parameters, and the
    modules' attributes themselves (counters, hidden states).

    Args:
        models: The watched models.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  #: id -> tensor, copy
        self._versions: dict[int, int] = {}
        self._changing: set[int] = set()
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._candidates: list[Tensor] = []
        self._held: list[int] = []  # ids of the buffers at the last look
        self._steps = 0

    def take(self) -> None:
        """Copies what may change; called at the first forward of a step."""
        self._attributes = [
            (module, {**vars(module), "_buffers": dict(vars(module)["_buffers"])}) for module in self._models.modules
        ]
        self._review()
        with torch.no_grad():
            live = [tensor for tensor in self._candidates if self._may_change(tensor)]
            if [id(tensor) for tensor in live] != list(self._kept):
                self._kept = {id(tensor): (tensor, tensor.detach().clone()) for tensor in live}
            elif live:
                torch._foreach_copy_([kept for _, kept in self._kept.values()], live)

    def _review(self) -> None:
        """Draws up the list of what may change: every so often, and when a buffer was replaced by another tensor."""
        held = [id(buffer) for _, _, buffer in self._models.buffers()]
        if self._steps % REVIEW_EVERY == 0 or held != self._held:
            self._candidates = list(self._models.mutable_tensors())
            self._held = held
        self._steps += 1

    def _may_change(self, tensor: Tensor) -> bool:
        if tensor.numel() * tensor.element_size() <= SMALL_BUFFER_BYTES:
            return True
        key, now = id(tensor), version(tensor)
        if self._versions.setdefault(key, now) != now:
            self._changing.add(key)
        return key in self._changing

    def at_start(self, tensor: Tensor) -> Tensor | None:
        """A fresh copy of a tensor as it was at the start of the step; None for those that never change."""
        kept = self._kept.get(id(tensor))
        return kept[1].clone() if kept is not None else None

    def attributes(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Every module with its attributes as they were at the start of the step."""
        return self._attributes


class StandIns:
    """Stand-ins for the leaves of one replay: aliases of parameters that share memory but gather their own gradients.

    Hooks on the real parameters (an optimizer in backward, ``DistributedDataParallel``'s reducer) never see them.

    Args:
        models: The watched models.
        keeper: What forward may change, as it was.
        converted: Gives each leaf the dtype in which the replay reads it.
    """

    def __init__(self, models: Models, keeper: StateKeeper, converted: Callable[[Tensor], Tensor]) -> None:
        self._models = models
        self._keeper = keeper
        self._converted = converted
        self._tensors: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # id -> original (kept, so that the id stays its), stand-in

    def of(self, tensor: Tensor) -> Tensor:
        """The stand-in of a leaf or of a tensor that a forward may change; any other tensor itself."""
        known = self._tensors.get(id(tensor))
        if known is None:
            known = self._tensors[id(tensor)] = (tensor, self._make(tensor))
        return known[1]

    def _make(self, tensor: Tensor) -> Tensor:
        copied = self._keeper.at_start(tensor)
        if copied is not None:
            copied = self._converted(copied)
            return nn.Parameter(copied, requires_grad=False) if isinstance(tensor, nn.Parameter) else copied
        if tensor.grad_fn is not None:
            return tensor
        if not tensor.requires_grad:
            small = tensor.numel() * tensor.element_size() <= COPIED_BYTES
            return self._converted(tensor.clone() if small else tensor)
        alias = self._converted(tensor.detach())
        return nn.Parameter(alias) if isinstance(tensor, nn.Parameter) else alias.requires_grad_()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter that took part, by name, as its stand-in."""
        for key, (name, _) in self._models.parameters.items():
            if key in self._tensors:
                yield name, self._tensors[key][1]

    def buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        """Module, name and stand-in of every buffer."""
        for module, name, buffer in self._models.buffers():
            yield module, name, self.of(buffer)

    @contextlib.contextmanager
    def in_place(self, hooks: list[Callable[..., Any]]) -> Iterator[None]:
        """Puts the stand-ins into the modules for the body, and everything back as it was after it.

        Args:
            hooks: Functions of the user's that run in the body besides those of the modules.
        """
        now = [(module, dict(module.__dict__)) for module in self._models.modules]
        surroundings = Surroundings(itertools.chain(functions_of(self._models.modules), hooks))
        twins = Twins(self.of)
        try:
            for module, attributes in self._keeper.attributes():
                module.__dict__.clear()
                module.__dict__.update({name: twins.of(value) for name, value in attributes.items()})
            yield
        finally:
            for module, attributes in now:
                module.__dict__.clear()
                module.__dict__.update(attributes)
            surroundings.put_back()
