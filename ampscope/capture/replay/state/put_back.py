"""Puts back what a replay has changed in things of the user's that it has to use as they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampscope.capture.torch_support.tensor_tree import container_kind, is_plain_object


class PutBack:
    """Remembers the contents of containers, the attributes of objects, the states of generators.

    What a replay has not changed is not written to: someone else may be using it.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._kept: dict[int, Any] = {}  # by id; kept, so that an id stays that of its object

    def all(self) -> None:
        """Restores all of it."""
        for undo in reversed(self._undo):
            undo()

    def by(self, undo: Callable[[], Any]) -> None:
        """Has ``undo`` called with the rest."""
        self._undo.append(undo)

    def keep(self, value: Any) -> None:
        """Remembers ``value`` itself, not what it holds in turn; a leaf's gradient goes away until then."""
        if id(value) in self._kept:
            return
        self._kept[id(value)] = value
        if container_kind(value) is not None:
            self._keep_container(value)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._undo.append(lambda: value.set_state(state))
        elif isinstance(value, random.Random):
            python = value.getstate()
            self._undo.append(lambda: value.setstate(python))
        elif hasattr(value, "bit_generator"):
            numpy = value.bit_generator.state
            self._undo.append(lambda: setattr(value.bit_generator, "state", numpy))
        elif isinstance(value, Tensor):
            if value.is_leaf and value.requires_grad:
                gradient, value.grad = value.grad, None
                self._undo.append(lambda: setattr(value, "grad", gradient))
        elif is_plain_object(value):
            self._keep_container(vars(value))

    def _keep_container(self, container: Any) -> None:
        kind, before = container_kind(container), _contents(container)

        def undo() -> None:
            now = _contents(container)
            if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
                _refill(kind, container, before)

        self._undo.append(undo)


def _contents(container: Any) -> list[Any]:
    """Everything in a container, in order; of a dict, keys and values in turn."""
    if isinstance(container, dict):
        return [each for pair in dict.items(container) for each in pair]
    return list(container)


def _refill(kind: Any, container: Any, contents: list[Any]) -> None:
    """Fills a container by the methods of the ``kind`` of Python's that it is; never empty, for who else reads it."""
    if issubclass(kind, dict):
        before = dict(zip(contents[::2], contents[1::2], strict=True))
        for key in [key for key in list(dict.keys(container)) if key not in before]:
            kind.__delitem__(container, key)
        for key, value in before.items():
            kind.__setitem__(container, key, value)
        for key, value in before.items() if list(dict.keys(container)) != list(before) else ():
            kind.__delitem__(container, key)
            kind.__setitem__(container, key, value)
    elif kind is set:
        set.intersection_update(container, contents)
        set.update(container, contents)
    elif kind is list:
        list.__setitem__(container, slice(None), contents)
    else:
        kind.clear(container)
        kind.extend(container, contents)
