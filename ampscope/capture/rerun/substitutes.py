"""Lets a step run again on substitutes for parameters, buffers and module attributes, so that none of them changes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.isolation.own_attributes import give, own_attributes, silenced
from ampscope.capture.isolation.state_copies import PutBack, StateCopies, functions_of, keep_function_state
from ampscope.capture.isolation.state_snapshot import StateSnapshot
from ampscope.capture.isolation.write_guard import COPIED_BYTES, WriteGuard
from ampscope.capture.tape.tape_entry import Entry, NoGradientError
from ampscope.capture.torch_support.models import Models
from ampscope.capture.torch_support.tensor_tree import inner_tensors, rewrapped
from ampscope.capture.tracing.light_statistics import finite
from ampscope.trace.schema import Node

#: Bytes by which kernels may ask how memory is aligned; what torch allocates is aligned to these.
_ALIGNED = 64


class Substitutes:
    """Substitutes for the leaves of one replay: aliases of parameters that share memory but gather their own gradients.

    Hooks on the real parameters (an optimizer in backward, ``DistributedDataParallel``'s reducer) never see them. What
    comes from outside and is no parameter is copied up to `COPIED_BYTES`, in case the step writes into it.

    Args:
        models: The watched models.
        snapshot: What forward may change, as it was.
        converted: Gives each leaf the dtype in which the replay reads it.
        guard: Puts back what the replay writes into memory that it shares with the training.
        instead: Parameters that stand in the place of others, by ``id`` of those.
    """

    def __init__(
        self,
        models: Models,
        snapshot: StateSnapshot,
        converted: Callable[[Tensor], Tensor],
        guard: WriteGuard,
        instead: Mapping[int, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        self._models = models
        self._snapshot = snapshot
        self._converted = converted
        self._guard = guard
        self._instead = instead
        # id -> original (kept, so that the id stays its), substitute
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        #: Every statistic as the step has left it, also those that a forward has put in the place of others.
        self.left: list[tuple[nn.Module, str, Tensor]] = []
        self.attributes: list[dict[str, Any]] = []  #: of each module, as the replay has them

    def of(self, tensor: Tensor) -> Tensor:
        """The substitute of a leaf or of a tensor that a forward may change; any other tensor itself."""
        return self._of(tensor, is_weight=isinstance(tensor, nn.Parameter))

    def _of(self, tensor: Tensor, *, is_weight: bool) -> Tensor:
        known = self._tensors.get(id(tensor))
        if known is None:
            other = self._instead.get(id(tensor))
            made = self._make(tensor, is_weight=is_weight) if other is None else nn.Parameter(other.detach())
            known = self._tensors[id(tensor)] = (tensor, made)
        return known[1]

    def clear(self) -> None:
        """Lets go of all substitutes, and of the gradients that they have gathered."""
        self._tensors.clear()
        self.left.clear()
        self.attributes.clear()

    def _make(self, tensor: Tensor, *, is_weight: bool) -> Tensor:
        """Makes a substitute; ``is_weight``: of a parameter, or of what one's wrapper keeps."""
        if inner_tensors(tensor):
            return self._rewrapped(tensor, is_weight=is_weight)
        copied = self._snapshot.at_start(tensor)
        if copied is not None and not tensor.requires_grad:  # it may have been frozen until this step
            copied = self._converted(copied)
            return _frozen(copied, tensor) if isinstance(tensor, nn.Parameter) else copied
        if tensor.grad_fn is not None:
            return tensor
        if not (is_weight or tensor.requires_grad) and tensor.nbytes <= COPIED_BYTES:
            return self._converted(_copied(tensor))
        alias = self._converted(self._guard.alias(tensor))
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(alias) if tensor.requires_grad else _frozen(alias, tensor)
        return alias.requires_grad_(tensor.requires_grad)

    def _rewrapped(self, tensor: Tensor, *, is_weight: bool) -> Tensor:
        """A wrapper around substitutes: an op on the wrapper itself, a copy too, is what its class makes of it."""
        if tensor.grad_fn is not None:
            return tensor
        leaf = self._converted(rewrapped(tensor, partial(self._of, is_weight=is_weight)))
        return leaf.requires_grad_() if tensor.requires_grad else leaf

    def backward_begins(self, entry: Entry) -> None:
        """Takes gradients away where the loop did so before a backward."""
        for _, parameter in self.parameters() if entry.begins_afresh else ():
            parameter.grad = None

    def gradient_of(self, parameter: int) -> Tensor:
        """The gradient that the substitute of a parameter, given by ``id``, has now.

        Raises:
            NoGradientError: It has none.
        """
        name, real = self._models.parameters[parameter]
        gradient = self.of(real).grad
        if gradient is None:
            raise NoGradientError(f"the gradient of {name} that the loop has changed came from before the step")
        return gradient

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter that took part, by name, as its substitute."""
        for key, (name, _) in self._models.parameters.items():
            if key in self._tensors:
                yield name, self._tensors[key][1]

    def leaves(self, carried: Mapping[int, str]) -> Iterator[tuple[Node, str, Tensor]]:
        """Every parameter and buffer of the models, with its name, as the step reads it from outside.

        Args:
            carried: Names of tensors in plain attributes that an earlier step has left there, by ``id``.
        """
        for name, parameter in self._models.parameters.values():
            yield Node.PARAMETER, name, self.of(parameter) if inner_tensors(parameter) else parameter
        for module, name, buffer in self.buffers():
            yield Node.BUFFER, ".".join(filter(None, (module, name))), buffer
        for held in self._snapshot.attribute_tensors() if carried else ():
            if id(held.tensor) in carried:
                yield Node.CARRIED, carried[id(held.tensor)], self.of(held.tensor)

    def attribute_tensors(self) -> dict[str, Tensor]:
        """The tensors in plain attributes of the models, by name, as the calls have left them."""
        return {held.name: held.tensor for held in self._snapshot.held.now()}

    def buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        """Module, name and substitute of every buffer."""
        for module, name, buffer in self._models.buffers():
            yield module, name, self.of(buffer)

    def bad_buffers(self) -> frozenset[str]:
        """Qualified names of the buffers that are not finite now."""
        bad = ((module, name) for module, name, buffer in self.buffers() if not finite(buffer))
        return frozenset(".".join(filter(None, each)) for each in bad)

    def at_start(self, module: str, name: str) -> Tensor | None:
        """A buffer as it was when the step began; None for one that no step has changed."""
        found = (buffer for owner, key, buffer in self._models.buffers() if (owner, key) == (module, name))
        buffer = next(found, None)
        return self._snapshot.at_start(buffer) if buffer is not None else None

    @contextlib.contextmanager
    def installed(self, hooks: list[Callable[..., Any]]) -> Iterator[None]:
        """Gives the modules the substitutes in this thread, for the body, and puts back what else may have changed.

        Args:
            hooks: Functions of the user's that run in the body besides those of the modules.
        """
        put_back = PutBack()
        keep_function_state(itertools.chain(functions_of(self._models.modules), hooks), put_back)
        copies = StateCopies(self.of, put_back)
        try:
            with own_attributes():
                for module, attributes in self._snapshot.attributes():
                    held = {name: copies.of(value) for name, value in attributes.items()} | silenced(module)
                    give(module, held)
                    self.attributes.append(held)
                yield
                self.left = list(self._snapshot.statistics())
        finally:
            put_back.all()


def _frozen(alias: Tensor, weight: Tensor) -> Tensor:
    """A weight that is not trained, in the memory of ``alias``, with all that code may ask ``weight`` for."""
    kind: Any = type(weight)
    if kind is nn.Parameter or alias.dtype is not weight.dtype or type(alias) is not Tensor:
        return nn.Parameter(alias, requires_grad=False)
    leaf: Tensor = Tensor._make_subclass(kind, alias)
    vars(leaf).update(vars(weight))  # a quantised weight keeps its scale there
    return leaf


def _copied(tensor: Tensor) -> Tensor:
    """A copy with the strides and the alignment of ``tensor``, by which kernels are chosen and round otherwise."""
    copied = tensor.clone()
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return copied
    if tensor.is_conj() or tensor.is_neg():
        return copied
    lead = tensor.data_ptr() % _ALIGNED
    if not tensor.numel() or lead % tensor.element_size() or (not lead and copied.stride() == tensor.stride()):
        return copied
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if extent > 2 * tensor.numel():
        return copied  # a few columns of something large: not worth the memory
    first = lead // tensor.element_size()
    room = torch.empty(first + extent, dtype=tensor.dtype, device=tensor.device)
    room[first:].copy_(tensor.as_strided((extent,), (1,)))
    return room.as_strided(tensor.shape, tensor.stride(), first)
