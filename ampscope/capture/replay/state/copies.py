"""Copies of what forward computes with, each made once; see `ownership` for what is copied."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.replay.state import ownership
from ampscope.capture.replay.state.ownership import Treatment
from ampscope.capture.replay.state.put_back import PutBack
from ampscope.capture.torch_support.tensor_tree import container_kind, is_plain_object, plain_copy

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEPTH = 5
#: Without items there is nothing to look into; a module has a dozen such for its hooks.
_BUILT_IN: frozenset[type] = frozenset({dict, OrderedDict, list, set})


class StateCopies:
    """Copies containers, generators and objects that hold state, each once, so that what is shared stays shared.

    Args:
        tensor: Gives the substitute of a tensor.
        put_back: Takes what is used as it is.
    """

    def __init__(self, tensor: Callable[[Tensor], Tensor], put_back: PutBack) -> None:
        self._tensor = tensor
        self._put_back = put_back
        self._made: dict[int, Any] = {}
        self._originals: list[Any] = []  # kept, so that an id stays that of its object

    def of(self, value: Any, depth: int = _DEPTH) -> Any:
        """The copy of ``value``; itself where it cannot change, or is put back or left alone.

        Raises:
            Exception: Whatever its own copying raises; there must be no replay then.
        """
        if issubclass(type(value), _PLAIN) or depth == 0:
            return value
        if issubclass(type(value), Tensor):
            return self._tensor(value)
        if id(value) not in self._made:
            self._originals.append(value)
            if type(value) in _BUILT_IN and not value:
                self._made[id(value)] = type(value)()
            else:
                self._made[id(value)] = value  # what refers to itself refers to the original
                self._made[id(value)] = self._copy(value, depth)
        return self._made[id(value)]

    def _copy(self, value: Any, depth: int) -> Any:
        if issubclass(type(value), torch.Generator):
            return value.clone_state()
        if ownership.is_generator(value):
            return copy.deepcopy(value)
        if issubclass(type(value), tuple):
            return self._tuple(value, depth)
        if container_kind(value) is not None:
            return self._container(value, depth)
        return self._object(value, depth) if is_plain_object(value) else value

    def _tuple(self, value: Any, depth: int) -> Any:
        held = list(tuple.__iter__(value))
        items = [self.of(item, depth - 1) for item in held]
        if all(item is before for item, before in zip(items, held, strict=True)):
            return value  # it cannot change, and some, as the time, cannot be made again
        if type(value).__module__ == "torch.return_types":
            return type(value)(items)
        return tuple.__new__(type(value), items)  # a named tuple's own constructor may look at its fields

    def _container(self, value: Any, depth: int) -> Any:
        kind, copied = container_kind(value), plain_copy(value)
        if isinstance(copied, dict):
            for key, item in list(dict.items(copied)):
                kind.__setitem__(copied, key, self.of(item, depth - 1))
        elif kind is not set:
            for index, item in enumerate(list(kind.__iter__(copied))):
                kind.__setitem__(copied, index, self.of(item, depth - 1))
        return copied

    def _object(self, value: Any, depth: int) -> Any:
        treatment, seen = ownership.judged(value)
        if treatment is Treatment.COPIED:
            copied = plain_copy(value)
            for name, item in list(vars(copied).items()):
                vars(copied)[name] = self.of(item, depth - 1)
            return copied
        for each in seen:
            self._put_back.keep(each)
        return value
